"""The baselines against their rules in plain Python, and what holds for every policy."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.baselines.routing.choose import POLICIES, choose
from testkit.controlplane.random_snapshots import World, copied, made_absurd, permuted, world
from testkit.controlplane.stated_policies import CHOOSING, SCORING

BASELINES = tuple(SCORING) + tuple(CHOOSING)
seeds = st.integers(0, 1 << 48)
NEAR = 1e-9  # sums in another order differ by less


def chosen(name: str, asked: World) -> int:
    """A policy's choice, without a change to the world's chance."""
    return int(choose(POLICIES.index(name), asked.snapshot, asked.request, copied(asked.state)))


def test_every_policy_but_ours_has_a_rule_here() -> None:
    assert set(POLICIES) == {*BASELINES, "least-harm"}


@pytest.mark.parametrize("name", SCORING)
@given(seed=seeds)
def test_the_best_score_gets_the_request_and_chance_decides_among_equals(name: str, seed: int) -> None:
    asked = world(seed)
    if not asked.usable:
        return
    scores = SCORING[name](asked)
    best = max(scores.values())
    near = [g for g, score in scores.items() if score >= best - NEAR * max(1.0, abs(best))]
    got = chosen(name, asked)
    assert got in near
    if all(scores[g] == best for g in near):
        assert got == min(near, key=asked.tie)


@pytest.mark.parametrize("name", CHOOSING)
@given(seed=seeds)
def test_the_rule_gives_the_same_group(name: str, seed: int) -> None:
    asked = world(seed)
    if asked.usable:
        assert chosen(name, asked) == CHOOSING[name](asked)


@pytest.mark.parametrize("name", POLICIES)
@given(seed=seeds)
def test_a_usable_group_is_chosen_in_any_order_of_groups(name: str, seed: int) -> None:
    asked = world(seed)
    got = chosen(name, asked)
    if not asked.usable:
        assert got == -1
        return
    assert asked.snapshot.groups[got].usable
    other, order = permuted(asked, seed + 1)
    assert order[chosen(name, other)] == got


@pytest.mark.parametrize("name", POLICIES)
@given(seed=seeds)
def test_numbers_that_cannot_be_give_a_usable_group(name: str, seed: int) -> None:
    asked = made_absurd(world(seed), seed)
    got = chosen(name, asked)
    assert got in asked.usable if asked.usable else got == -1


def taken(name: str, asked: World, times: int) -> Counter[int]:
    """The frequency with which a policy takes each group; the state's chance moves on."""
    policy = POLICIES.index(name)
    return Counter(int(choose(policy, asked.snapshot, asked.request, asked.state)) for _ in range(times))


def idle_groups() -> World:
    asked = world(9)
    asked.snapshot.groups.usable = 1
    asked.snapshot.groups.batch.rows = 0
    asked.snapshot.models.max_rows = 100
    return asked


@pytest.mark.parametrize("name", ["random", "two-choices"])
def test_chance_takes_each_of_equal_groups_as_often(name: str) -> None:
    asked, times = idle_groups(), 4000
    count = len(asked.snapshot.groups)
    often = taken(name, asked, times)
    each = times / count
    assert set(often) == set(range(count))
    assert sum((number - each) ** 2 / each for number in often.values()) < 40  # chi-square, at most 7 degrees


def test_the_busier_of_two_random_groups_is_never_chosen() -> None:
    asked = idle_groups()
    count = len(asked.snapshot.groups)
    asked.snapshot.groups.batch.rows = range(count)
    often = taken("two-choices", asked, 2000)
    assert sorted(often, key=lambda g: -often[g]) == list(range(count - 1))
