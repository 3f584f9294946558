"""Plans on the Pareto front, against the definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from placement.pareto import pareto

COSTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), max_size=12)


def test_the_front_follows_its_definition() -> None:
    assert pareto([(1, 9), (2, 2), (9, 1), (3, 3), (2, 2)]) == (True, True, True, False, True)
    assert pareto([]) == ()


@given(COSTS)
def test_some_plan_is_best_and_every_other_is_beaten_by_one_that_is(costs: list[tuple[int, ...]]) -> None:
    best = pareto(costs)
    front = [cost for cost, good in zip(costs, best, strict=True) if good]
    assert bool(front) == bool(costs)
    for cost, good in zip(costs, best, strict=True):
        beaten = any(f != cost and all(a <= b for a, b in zip(f, cost, strict=True)) for f in front)
        assert beaten != good
