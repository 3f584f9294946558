"""Choosing, against brute force."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from placement.choose import choose, cost_gib_s, rounded
from placement.types import Candidate, Infeasible, Intent, Plan, Slos
from profiler.types import Estimate

TOKENS = 10


def candidate(
    ttft_s: float, tpot_s: float, gib: float, accuracy: float = 1.0, tp: int = 1, layers: int = 4
) -> Candidate:
    memory = (int(gib * 2**30),) * tp
    return Candidate(Plan(tp, (layers,), "none", 64, 64, 1, 8), Estimate(ttft_s, tpot_s, memory, accuracy))


AMOUNT = st.sampled_from([0.1, 0.25, 0.5, 1.0, 3.7]) | st.floats(0.01, 10)
CANDIDATES = st.lists(
    st.builds(candidate, AMOUNT, AMOUNT, AMOUNT, st.sampled_from([0.5, 0.9, 1.0]), st.integers(1, 4)),
    min_size=1,
    max_size=8,
)
BOUND = st.none() | AMOUNT
SLOS = st.builds(Slos, BOUND, BOUND, BOUND, BOUND, st.none() | st.sampled_from([0.4, 0.8, 0.95]))


def keeps(c: Candidate, slos: Slos) -> bool:
    e = c.estimate
    latency = e.ttft_s + e.tpot_s * (TOKENS - 1)
    cost = sum(e.memory_bytes) / 2**30 * latency
    return (
        (slos.latency_s is None or latency <= slos.latency_s)
        and (slos.ttft_s is None or e.ttft_s <= slos.ttft_s)
        and (slos.tpot_s is None or e.tpot_s <= slos.tpot_s)
        and (slos.cost_gib_s is None or cost <= slos.cost_gib_s)
        and (slos.accuracy is None or e.accuracy >= slos.accuracy)
    )


@given(candidates=CANDIDATES, slos=SLOS, intent=st.sampled_from(Intent), seed=st.integers(0, 9))
def test_the_best_of_the_feasible_whatever_the_order(
    candidates: list[Candidate], slos: Slos, intent: Intent, seed: int
) -> None:
    outcome = choose(candidates, intent, slos, TOKENS)
    shuffled = random.Random(seed).sample(candidates, len(candidates))
    again = choose(shuffled, intent, slos, TOKENS)
    feasible = [c for c in candidates if keeps(c, slos)]
    if not feasible:
        assert isinstance(outcome, Infeasible)
        assert isinstance(again, Infeasible)
        assert outcome == again
        return
    assert not isinstance(outcome, Infeasible)
    assert outcome == again
    assert sorted(map(repr, outcome)) == sorted(map(repr, feasible))
    values = [
        c.estimate.latency_s(TOKENS) if intent is Intent.MIN_LATENCY else cost_gib_s(c, TOKENS)
        for c in outcome
    ]
    assert values == sorted(values)


@given(candidates=CANDIDATES, slos=SLOS)
def test_each_relaxation_is_enough(candidates: list[Candidate], slos: Slos) -> None:
    """Setting the limits to the numbers in the message makes the same request feasible."""
    outcome = choose(candidates, Intent.SLO, slos, TOKENS)
    if not isinstance(outcome, Infeasible):
        return
    assert outcome.relaxations
    for text in outcome.relaxations:
        changes = {name: float(to) for name, to in re.findall(r"(\w+) from \S+ to ([-+.\de]+)", text)}
        assert changes
        relaxed = choose(candidates, Intent.SLO, replace(slos, **changes), TOKENS)
        assert not isinstance(relaxed, Infeasible), text


@given(value=st.floats(1e-6, 1e9), up=st.booleans())
@example(value=41.300000000000004, up=True)
def test_a_number_shown_is_never_on_the_wrong_side(value: float, up: bool) -> None:
    shown = float(f"{rounded(value, up=up):.10g}")
    assert shown >= value if up else shown <= value
    assert math.isclose(shown, value, rel_tol=2e-3)


def test_intents_differ() -> None:
    small_slow, large_fast = candidate(0.1, 0.2, 1.0), candidate(0.1, 0.1, 3.0, tp=2)
    both = [large_fast, small_slow]
    assert choose(both, Intent.MIN_COST, Slos(), TOKENS) == (small_slow, large_fast)
    assert choose(both, Intent.MIN_LATENCY, Slos(), TOKENS) == (large_fast, small_slow)
    assert choose(both, Intent.SLO, Slos(latency_s=1.5), TOKENS) == (large_fast,)
    assert choose(both, Intent.MIN_LATENCY, Slos(cost_gib_s=2.0), TOKENS) == (small_slow,)


def test_ties_go_to_the_fewest_ranks() -> None:
    one, two = candidate(0.1, 0.1, 2.0), candidate(0.1, 0.1, 1.0, tp=2)
    assert choose([two, one], Intent.MIN_COST, Slos(), TOKENS) == (one, two)


def test_the_binding_limit_and_its_number_are_named() -> None:
    outcome = choose([candidate(0.25, 0.1, 1.0)], Intent.MIN_COST, Slos(ttft_s=0.2, tpot_s=0.5), TOKENS)
    assert isinstance(outcome, Infeasible)
    assert "ttft_s 0.2 is out of reach, the best is 0.25 s" in outcome.reason
    assert outcome.relaxations == ("raise ttft_s from 0.2 to 0.25 s",)


def test_limits_that_only_clash_say_so() -> None:
    pair = [candidate(0.1, 0.9, 1.0), candidate(0.9, 0.1, 1.0)]
    outcome = choose(pair, Intent.SLO, Slos(ttft_s=0.2, tpot_s=0.2), TOKENS)
    assert isinstance(outcome, Infeasible)
    assert "ttft_s and tpot_s together" in outcome.reason
    assert len(outcome.relaxations) == 2


def test_no_candidates() -> None:
    assert isinstance(choose([], Intent.MIN_COST, Slos(), TOKENS), Infeasible)


@given(value=st.floats(-1e12, 1e12).filter(lambda x: x == 0 or abs(x) > 1e-9))
def test_rounding_stays_on_the_safe_side(value: float) -> None:
    assert rounded(value, up=False) <= value <= rounded(value, up=True)
    assert rounded(value, up=True) == pytest.approx(value, rel=2e-3)
