"""Choosing N from a profile."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.variant_limit import SlotMeasurement, candidate_limits, choose_limit


def points(*rows: tuple[int, float, float]) -> list[SlotMeasurement]:
    return [SlotMeasurement(*row) for row in rows]


def test_the_most_throughput_wins() -> None:
    assert choose_limit(points((1, 50, 0.1), (2, 90, 0.5), (4, 70, 0.2))) == 2


def test_among_equals_the_shortest_wait_then_the_smallest() -> None:
    assert choose_limit(points((2, 100, 0.5), (4, 98, 0.2), (8, 99, 0.2))) == 4
    assert choose_limit(points((2, 100, 0.5), (4, 98, 0.2)), tolerance=0.0) == 2


def test_a_limit_on_the_wait() -> None:
    profile = points((1, 100, 0.9), (2, 80, 0.4), (4, 60, 0.3))
    assert choose_limit(profile, max_ttft_s=0.5) == 2
    assert choose_limit(profile, max_ttft_s=0.1) == 4, "none meets it: the nearest"


def test_no_limit_is_chosen_without_measurements() -> None:
    with pytest.raises(ValueError, match="at least one"):
        choose_limit([])


def test_candidates_are_within_bounds() -> None:
    assert candidate_limits(4, 9) == (1, 2, 4)
    assert candidate_limits(6, 9) == (1, 2, 4, 6)
    assert candidate_limits(8, 3) == (1, 2, 3)
    assert candidate_limits(1, 5) == (1,)
    with pytest.raises(ValueError, match="got 0 and 1"):
        candidate_limits(0, 1)


@given(
    st.lists(
        st.builds(SlotMeasurement, st.integers(1, 64), st.floats(0, 1e6), st.floats(0, 1e3)), min_size=1
    ),
    st.none() | st.floats(0, 1e3),
)
def test_the_choice_was_measured_and_nothing_allowed_is_much_faster(
    profile: list[SlotMeasurement], max_ttft_s: float | None
) -> None:
    chosen = choose_limit(profile, max_ttft_s)
    allowed = [m for m in profile if max_ttft_s is None or m.ttft_s <= max_ttft_s] or profile
    assert chosen in {m.limit for m in allowed}
    if max_ttft_s is None:
        assert max(m.tokens_per_s for m in allowed if m.limit == chosen) >= 0.96 * max(
            m.tokens_per_s for m in profile
        )


@given(st.integers(1, 200), st.integers(1, 200))
def test_candidates_are_few_and_reach_the_end(slots: int, variants: int) -> None:
    found = candidate_limits(slots, variants)
    assert list(found) == sorted(set(found))
    assert (found[0], found[-1]) == (1, min(slots, variants))
    assert len(found) <= 9
