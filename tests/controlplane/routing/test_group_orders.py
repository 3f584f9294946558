"""More groups than are all looked at: the orders against a plain sort, the pick against the cheapest of those
that it is said to look at, and what holds for any number of groups."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.baselines.routing.choose import POLICIES, choose
from controlplane.routing.bookkeeping import cached, ended, filled, renew, sent, set_usable
from controlplane.routing.candidates import FIRST, HOST, NEAR, candidate, gather
from controlplane.routing.dispatch import dispatch
from controlplane.routing.least_harm import pool_of
from controlplane.routing.orders import BASE, FAST, FRESH, invalidate
from controlplane.routing.placements.tick import tick
from controlplane.routing.prospect import prospect
from controlplane.routing.scorers.total import cost_s
from controlplane.routing.snapshot import (
    ELSEWHERE,
    IN_HOST_MEMORY,
    IN_SLOT,
    LOADING,
    LOOK_AT_ALL,
    NO_PROMISE,
    ORDER,
    ORDERS,
    REQUEST,
)
from profiler.compiled import records
from testkit.controlplane import stated_policies
from testkit.controlplane.random_snapshots import World, made_absurd, permuted, world

OURS = POLICIES.index("least-harm")
seeds = st.integers(0, 1 << 48)
sizes = st.integers(LOOK_AT_ALL + 1, 150)
few_examples = settings(max_examples=max(1, settings().max_examples // 4), deadline=None)


def many(seed: int, groups: int, pools: int = 1) -> World:
    """The snapshot has ceilings for N pools. One variant more than requested costs nothing anywhere."""
    asked = world(seed, groups)
    rng = np.random.default_rng(seed + 1)
    asked.snapshot.groups.ceiling = rng.choice([2, 4, 99][-pools:], groups)
    return asked


def chosen(asked: World) -> int:
    return int(choose(OURS, asked.snapshot, asked.request, asked.state))


def predicted(asked: World, g: int) -> float:
    return stated_policies.least_harm_s(asked, g, stated_policies.pool_of(asked))


# --- the orders --------------------------------------------------------------------------------------------


def largest_class(world: World, g: int) -> int:
    if not world.model(g).padded_s > 0:
        return 0
    there = [v for v in range(1, len(world.snapshot.held)) if world.snapshot.held[v, g].rows > 0]
    return max((int(world.snapshot.variants[0, v].rank_class) for v in there), default=0)


def typical() -> Any:
    made = records(REQUEST, 1)[0]
    made.prompt = made.output = 200.0
    made.ttft_s = made.tpot_s = math.inf
    made.home, made.promise = -1, NO_PROMISE
    return made


def stated_key(asked: World, order: int, g: int) -> float:
    """A cost, by the whole cost of a request of the base, or of a variant that adds nothing but a slot."""
    snapshot, request = asked.snapshot, typical()
    if order == FAST:
        return float(snapshot.groups[g].tpot_s)
    if order == FRESH:
        free = len(snapshot.held)
        snapshot = snapshot._replace(
            held=np.concatenate([snapshot.held, snapshot.held[:1]]).view(np.recarray),
            variants=np.concatenate([snapshot.variants, snapshot.variants[:, :1]], 1).view(np.recarray),
        )
        snapshot.held[free] = (0, IN_SLOT)
        request.variant = free
    return float(cost_s(snapshot, g, request, prospect(snapshot, g, request), False))


def check_orders(asked: World) -> None:
    """The group at each place is the one that a sort puts there; keys equal recomputed keys."""
    snapshot, count = asked.snapshot, len(asked.snapshot.groups)
    shelves = [
        (
            not group.usable,
            group.usable and (group.model, group.ceiling, largest_class(asked, g), group.tightest // 35),
        )
        for g, group in enumerate(snapshot.groups)
    ]
    for order in (BASE, FRESH, FAST):
        of_order = snapshot.orders[order]
        expected = [stated_key(asked, order, g) for g in range(count)]
        assert of_order.key == pytest.approx(expected, rel=1e-6, abs=1e-9)
        places = sorted(range(count), key=lambda g: (shelves[g], of_order[g].key, snapshot.groups[g].key))
        assert list(of_order.group) == places
        assert [places[place] for place in of_order.place] == list(range(count))


def any_request(asked: World, rng: np.random.Generator) -> Any:
    made = records(REQUEST, 1)[0]
    made.variant, made.prompt, made.output = (
        rng.integers(len(asked.snapshot.held)),
        rng.integers(1, 900),
        90.0,
    )
    made.ttft_s = made.tpot_s = math.inf
    made.promise, made.home = NO_PROMISE, -1
    made.key = rng.integers(1, 1 << 62, dtype=np.uint64)
    return made


def happen(asked: World, rng: np.random.Generator, events: int) -> None:
    """Events of groups in a gateway."""
    snapshot, there = asked.snapshot, []
    for _ in range(events):
        g = int(rng.integers(len(snapshot.groups)))
        kind = rng.integers(8)
        if kind <= 2:
            request = any_request(asked, rng)
            g = dispatch(snapshot, request, asked.state, True)
            if g >= 0:
                snapshot.held[request.variant, g].where = rng.integers(LOADING, IN_SLOT + 1)
                there.append([g, request, False])
        elif kind == 3 and there:
            at = there[int(rng.integers(len(there)))]
            if not at[2]:
                filled(snapshot, at[0], at[1])
                at[2] = True
        elif kind == 4 and there:
            ended(snapshot, *there.pop(int(rng.integers(len(there)))))
        elif kind == 5:
            set_usable(snapshot, g, bool(rng.random() < 0.7))
        elif kind == 6:
            snapshot.groups[g].correction = rng.uniform(0.7, 1.5)
            renew(snapshot, g)
            cached(snapshot, g, float(rng.uniform(0, 5000)))
        elif rng.random() < 0.3:
            snapshot.groups[g].ceiling, snapshot.groups[g].key = (
                rng.choice([2, 4, 99]),
                rng.integers(1, 1 << 60),
            )
            invalidate(snapshot)
        elif rng.random() < 0.3:
            tick(snapshot, asked.state, float(asked.state.clock[0].last_s + 5.0))


@few_examples
@given(seed=seeds, groups=sizes)
def test_kept_orders_always_equal_a_sort(seed: int, groups: int) -> None:
    asked = many(seed, groups, 3)
    happen(asked, np.random.default_rng(seed), 60)
    chosen(asked)
    check_orders(asked)


def test_few_groups_need_no_orders() -> None:
    assert world(3, LOOK_AT_ALL).snapshot.orders.shape == (ORDERS, 0)
    assert world(3, LOOK_AT_ALL + 1).snapshot.orders.shape == (ORDERS, LOOK_AT_ALL + 1)


# --- the pick ----------------------------------------------------------------------------------------------


@few_examples
@given(seed=seeds, groups=sizes, pools=st.integers(1, 3))
def test_a_group_of_the_least_cost_of_those_looked_at(seed: int, groups: int, pools: int) -> None:
    asked = many(seed, groups, pools)
    happen(asked, np.random.default_rng(seed), 20)
    if not asked.usable:
        return
    got, wanted = chosen(asked), stated_policies.pool_of(asked)
    assert pool_of(asked.snapshot, asked.request) == wanted
    looked_at = set()
    for in_pool in (True, False):
        count = gather(asked.snapshot, asked.request, wanted, in_pool)
        looked_at |= {int(candidate(asked.snapshot, number)) for number in range(count)}
    usable = looked_at & set(asked.usable)
    assert predicted(asked, got) == pytest.approx(min(predicted(asked, g) for g in usable))


@few_examples
@given(seed=seeds, groups=sizes)
def test_all_groups_of_small_pools_are_looked_at(seed: int, groups: int) -> None:
    asked = many(seed, groups, 3)
    usable = np.random.default_rng(seed).permutation(groups)[:LOOK_AT_ALL]
    asked.snapshot.groups.usable = 0
    asked.snapshot.groups.usable[usable] = 1
    assert predicted(asked, chosen(asked)) == pytest.approx(min(predicted(asked, g) for g in asked.usable))


@few_examples
@given(seed=seeds, groups=sizes)
def test_the_cheapest_groups_are_looked_at(seed: int, groups: int) -> None:
    asked = many(seed, groups)
    rng = np.random.default_rng(seed)
    snapshot, request = asked.snapshot, asked.request
    snapshot.groups.usable = 1
    snapshot.groups.model = snapshot.groups.promises = 0
    snapshot.groups.tightest = NO_PROMISE
    snapshot.models.padded_s = 0.0
    request.variant, request.cached, request.home = 1, 5.0, rng.integers(groups)
    shares = rng.dirichlet([1, 1, 1, 1])
    snapshot.held[1].where = rng.choice([ELSEWHERE, IN_HOST_MEMORY, LOADING, IN_SLOT], groups, p=shares)
    chosen(asked)
    count = gather(snapshot, request, 99, True)
    looked_at = [int(candidate(snapshot, number)) for number in range(count)]
    assert len(set(looked_at)) == count <= NEAR + HOST + sum(FIRST) + 1
    assert int(request.home) in looked_at
    near = [g for g in range(groups) if asked.held(g).rows > 0 or asked.held(g).where >= LOADING]
    host = [g for g in range(groups) if g not in near and asked.held(g).where == IN_HOST_MEMORY]
    for having, most, order in ((near, NEAR, BASE), (host, HOST, FRESH)):
        keys = snapshot.orders[order].key
        first = sorted(keys[having])[:most]
        assert sorted(keys[[g for g in having if g in looked_at]])[:most] == pytest.approx(first)
    for order in range(ORDERS):
        keys = snapshot.orders[order].key
        least = sorted(keys)[: FIRST[order]]
        assert sorted(keys[looked_at])[: FIRST[order]] == pytest.approx(least)


@few_examples
@given(seed=seeds, groups=sizes, pools=st.integers(1, 3))
def test_the_order_of_groups_does_not_matter(seed: int, groups: int, pools: int) -> None:
    asked = many(seed, groups, pools)
    other, order = permuted(asked, seed + 1)
    if asked.usable:
        assert order[chosen(other)] == chosen(asked)


def test_equal_groups_get_as_many_requests_each() -> None:
    asked, rng = many(9, 100), np.random.default_rng(1)
    groups = asked.snapshot.groups
    groups[:] = groups[0]
    groups.key, groups.usable = rng.integers(1, 1 << 62, 100), 1
    asked.snapshot.held[:] = asked.snapshot.held[:, :1]
    often = np.zeros(100)
    for key in rng.integers(1, 1 << 62, 2000, dtype=np.uint64):
        asked.request.key = key
        often[chosen(asked)] += 1
    assert ((often - 20) ** 2 / 20).sum() < 180  # chi-square, 99 degrees


@few_examples
@given(seed=seeds)
def test_groups_that_changed_without_a_word_are_found(seed: int) -> None:
    asked = many(seed, 100)
    chosen(asked)
    asked.snapshot.groups.usable = 0
    assert chosen(asked) == -1
    asked.snapshot.groups.usable[int(seed % 100)] = 1
    assert chosen(asked) == seed % 100


@few_examples
@given(seed=seeds)
def test_numbers_that_cannot_be_give_a_usable_group(seed: int) -> None:
    asked = made_absurd(many(seed, LOOK_AT_ALL + 10), seed)
    for g in range(10):
        renew(asked.snapshot, g)
    if asked.usable:
        assert chosen(asked) in asked.usable


def test_only_our_policy_reads_orders() -> None:
    for name in POLICIES[1:]:
        asked = many(4, 100)
        choose(POLICIES.index(name), asked.snapshot, asked.request, asked.state)
        sent(asked.snapshot, 3, asked.request)
        assert (asked.snapshot.orders == records(ORDER, (ORDERS, 100))).all()
