"""The smallest cluster, against trying all; intervals, against a table of Student's t."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.simulation.intervals import mean_of, over_seeds
from controlplane.simulation.sizing import AROUND, smallest

MOST = 60


@given(
    st.lists(st.floats(0, 1), min_size=MOST, max_size=MOST).map(sorted), st.floats(0, 1), st.integers(1, 99)
)
def test_the_smallest_is_found_where_attainment_grows(by: list[float], wanted: float, start: int) -> None:
    sized = smallest(lambda groups: by[groups - 1], wanted, start, MOST)
    expected = next((groups for groups in range(1, MOST + 1) if by[groups - 1] >= wanted), None)
    assert sized.groups == expected
    assert len(sized.tried) <= 2 * 7 + AROUND
    assert all(sized.tried[groups] == by[groups - 1] for groups in sized.tried)


@given(st.lists(st.floats(0, 1), min_size=MOST, max_size=MOST), st.floats(0, 1), st.integers(1, MOST))
def test_the_next_smaller_number_is_not_enough_where_attainment_does_not_grow(
    by: list[float], wanted: float, start: int
) -> None:
    groups = smallest(lambda groups: by[groups - 1], wanted, start, MOST).groups
    if groups is None:
        assert by[MOST - 1] < wanted
    else:
        assert by[groups - 1] >= wanted
        assert all(by[fewer - 1] < wanted for fewer in range(max(1, groups - AROUND), groups))


@pytest.mark.parametrize(
    ("values", "mean", "half"),
    [([1.0, 2.0], 1.5, 12.706 * 0.5), ([1.0, 2.0, 3.0], 2.0, 4.3027 / 3**0.5), ([4.0] * 5, 4.0, 0.0)],
)
def test_intervals_are_students(values: list[float], mean: float, half: float) -> None:
    found = mean_of(values)
    assert found["mean"] == pytest.approx(mean)
    assert found["low"] == pytest.approx(mean - half, rel=1e-4)
    assert found["high"] == pytest.approx(mean + half, rel=1e-4)


def test_one_seed_has_no_interval() -> None:
    assert mean_of([3.0]) == {"mean": 3.0, "low": None, "high": None}


def test_documents_are_summed_up_by_field() -> None:
    runs = [{"a": {"b": 1, "c": None}}, {"a": {"b": 3, "c": None, "d": 5.0}}]
    found = over_seeds(runs)
    assert found["a"]["b"]["mean"] == 2
    assert found["a"]["c"] is None
    assert found["a"]["d"]["mean"] == 5
