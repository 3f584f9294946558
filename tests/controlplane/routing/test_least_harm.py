"""Ours: what an idle group more does, and what a group's last slots, rows and tokens cost."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.baselines.routing.choose import POLICIES, choose
from controlplane.routing.bookkeeping import cached, ended, sent
from controlplane.routing.least_harm import pool_of
from controlplane.routing.prospect import MARGIN, excess_of, prospect
from controlplane.routing.scorers.pressure import FULL_S, STEEPNESS, pressure_s, rise
from controlplane.routing.scorers.total import cost_s
from controlplane.routing.snapshot import promise_class
from controlplane.routing.starts import starts_s
from testkit.controlplane import stated_policies
from testkit.controlplane.random_snapshots import World, copied, with_idle_group, world

seeds = st.integers(0, 1 << 48)
OURS = POLICIES.index("least-harm")


def predicted(asked: World, g: int) -> float:
    """The cost of a group."""
    of_group = prospect(asked.snapshot, g, asked.request)
    return float(cost_s(asked.snapshot, g, asked.request, of_group, False))


def chosen(asked: World) -> int:
    return int(choose(OURS, asked.snapshot, asked.request, copied(asked.state)))


@given(seed=seeds)
def test_the_group_chosen_has_the_least_cost_of_all_that_are_usable(seed: int) -> None:
    asked = world(seed)
    if asked.usable:
        assert predicted(asked, chosen(asked)) == min(predicted(asked, g) for g in asked.usable)


@given(seed=seeds)
def test_an_idle_group_more_never_worsens_the_predicted_cost(seed: int) -> None:
    before = world(seed)
    after = with_idle_group(before)
    got = chosen(after)
    if before.usable:
        assert predicted(after, got) <= predicted(before, chosen(before))
    else:
        assert got == len(before.snapshot.groups)


@given(seed=seeds)
def test_an_idle_group_more_changes_no_other_groups_cost(seed: int) -> None:
    before = world(seed)
    after = with_idle_group(before)
    assert [predicted(after, g) for g in before.usable] == [predicted(before, g) for g in before.usable]


# The groups have ceilings. The costs of the random groups lie on both sides of that of a broken promise.
CEILINGS = (1, 2, 4, 6, 99)


def with_pools(asked: World, seed: int) -> World:
    rng = np.random.default_rng(seed + 1)
    some = rng.permutation(CEILINGS)[: rng.integers(2, 4)]
    asked.snapshot.groups.ceiling = rng.choice(some, len(asked.snapshot.groups))
    return asked


@given(seed=seeds)
def test_the_chosen_group_has_the_least_cost_with_pools_counted(seed: int) -> None:
    asked = with_pools(world(seed), seed)
    if asked.usable:
        wanted = stated_policies.pool_of(asked)
        costs = {g: stated_policies.least_harm_s(asked, g, wanted) for g in asked.usable}
        assert pool_of(asked.snapshot, asked.request) == wanted
        assert costs[chosen(asked)] == pytest.approx(min(costs.values()))


@given(seed=seeds, ceiling=st.sampled_from(CEILINGS))
def test_another_idle_group_never_worsens_the_choice_with_pools(seed: int, ceiling: int) -> None:
    """Unless it opens a pool that suits the request better: then it costs no more than in the idle group."""
    before = with_pools(world(seed), seed)
    after = with_idle_group(before)
    idle = len(before.snapshot.groups)
    after.snapshot.groups[idle].ceiling = ceiling
    wanted, got = stated_policies.pool_of(after), chosen(after)
    cost = stated_policies.least_harm_s(after, got, wanted)
    assert cost <= stated_policies.least_harm_s(after, idle, wanted)
    if before.usable and stated_policies.pool_of(before) == wanted:
        assert cost <= stated_policies.least_harm_s(before, chosen(before), wanted)


@given(st.floats(0, 3), st.floats(0, 3))
def test_a_resource_costs_what_its_potential_rises(before: float, after: float) -> None:
    """It grows exponentially to all that there is, and then in a straight line."""
    low, high = (
        math.exp(STEEPNESS * (share - 1)) if share <= 1 else 1 + STEEPNESS * (share - 1)
        for share in (before, after)
    )
    assert rise(before, after) == pytest.approx(high - low)


@given(st.floats(0, 9), st.floats(0, 9), st.floats(0.01, 3))
def test_the_fuller_a_resource_is_the_more_a_share_of_it_costs(a: float, b: float, more: float) -> None:
    """An overdrawn resource is included: a resource with too much load is never the cheapest."""
    low, high = sorted((a, b))
    assert rise(low, low + more) <= rise(high, high + more) * (1 + 1e-9)


@given(st.floats(1e-3, 1.0), st.floats(1e-3, 1.0), st.floats(0, 0.5), st.floats(2e-3, 1.0))
def test_a_promise_that_is_exceeded_further_costs_more(
    a: float, b: float, spread_s: float, promise_s: float
) -> None:
    """The excess grows by at least its own size, and at most by it and the spread."""
    low, high = sorted((a, b))
    costs = [excess_of(tpot_s, spread_s, promise_s) for tpot_s in (low, high)]
    assert costs[0] <= costs[1]
    over = max(0.0, high / promise_s - MARGIN)
    assert over * (1 - 1e-9) <= costs[1] <= over + max(spread_s / promise_s, 0.05) + 1e-9


@pytest.mark.parametrize(("rows", "each_output"), [(2, 25), (40, 25), (40, 4)])
def test_prompts_that_start_within_one_step_share_it(rows: int, each_output: int) -> None:
    """If n rows make L tokens, n / L start in each step: up to one a step makes that step longer, and more
    than one are filled together. By hand, with steps of 10 ms + 0.1 ms for a prompt token or a row."""
    model = slots_only().snapshot.models[0]
    model.decode_s = 0.010 + 1e-4 * np.arange(len(model.decode_s))
    model.prefill_grain = 100.0
    model.prefill_s = 0.010 + 1e-4 * 100.0 * np.arange(len(model.prefill_s))
    starts = rows / each_output
    longer_s = starts_s(model, rows, starts, 200.0 * starts, 0.0)
    assert longer_s == pytest.approx(1e-4 * 200 * starts)


def test_an_idle_group_is_chosen_before_a_group_with_broken_promises() -> None:
    """Long prompts with short answers: three requests are more than a group keeps. The fourth one would break
    no promise there that is not broken already, and goes to the idle group all the same."""
    asked = slots_only()
    snapshot, request = asked.snapshot, asked.request
    request.variant, request.prompt, request.output = 0, 2000.0, 5.0
    request.tpot_s, request.promise = 0.02, promise_class(0.02)
    loaded = with_idle_group(asked)
    for _ in range(3):
        sent(loaded.snapshot, 0, request)
    assert predicted(loaded, len(snapshot.groups)) < predicted(loaded, 0)


def slots_only() -> World:
    """A group in which nothing but slots is scarce, and nothing asked."""
    asked = world(3)
    snapshot = asked.snapshot
    snapshot.models.max_rows = snapshot.models.kv_tokens = 1 << 40
    snapshot.models.slots = 4
    snapshot.variants.row_s = snapshot.variants.variant_s = snapshot.variants.token_s = 0.0
    for name in ("starts", "start_tokens", "start_s", "unfilled", "distinct", "tpot_s", "step_s"):
        snapshot.groups[name] = 0
    snapshot.groups.batch = np.zeros(1, snapshot.groups.batch.dtype)[0]
    snapshot.groups.promises = 0
    snapshot.groups.tightest = asked.request.promise
    snapshot.held.rows = 0
    asked.request.variant, asked.request.tpot_s = 1, math.inf
    return asked


def test_n_plus_one_requests_of_a_variant_share_the_cost_of_its_slot() -> None:
    asked = slots_only()
    whole_s = FULL_S * (math.exp(STEEPNESS * (1 / 4 - 1)) - math.exp(-STEEPNESS))
    for others in range(5):
        got = pressure_s(asked.snapshot, 0, asked.request, prospect(asked.snapshot, 0, asked.request))
        assert got == pytest.approx(whole_s / (others + 1), rel=1e-6)
        sent(asked.snapshot, 0, asked.request)


def test_the_last_slot_costs_more_than_the_first() -> None:
    asked, costs = slots_only(), []
    for distinct in range(4):
        asked.snapshot.groups.distinct = distinct
        of_group = prospect(asked.snapshot, 0, asked.request)
        costs.append(pressure_s(asked.snapshot, 0, asked.request, of_group))
    ratios = [later / earlier for earlier, later in itertools.pairwise(costs)]
    assert ratios == pytest.approx([math.exp(STEEPNESS / 4)] * 3, rel=1e-6)


def test_a_stretch_follows_what_is_seen_and_forgives_what_is_no_number() -> None:
    asked = slots_only()
    for _ in range(8):
        sent(asked.snapshot, 0, asked.request)
    context = float(asked.snapshot.groups[0].batch.context)
    for _ in range(1000):
        cached(asked.snapshot, 0, 1.5 * context)
        for absurd in (math.nan, -1.0, 0.0):
            cached(asked.snapshot, 0, absurd)
    assert asked.snapshot.groups[0].stretch == pytest.approx(1.5)
    for _ in range(8):
        ended(asked.snapshot, 0, asked.request, False)
    cached(asked.snapshot, 0, 1e9)  # nothing is expected there
    assert asked.snapshot.groups[0].stretch == pytest.approx(1.5)
