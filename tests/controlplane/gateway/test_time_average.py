"""The mean of a number over time, against the sum of its pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.gateway.time_average import TimeAverage

STEPS = st.lists(st.tuples(st.integers(-3, 3), st.sampled_from((0.25, 0.5, 3.0))), min_size=1, max_size=20)


@given(STEPS)
def test_the_average_is_the_area_over_the_time(steps: list[tuple[int, float]]) -> None:
    now_s = 100.0
    number = TimeAverage(lambda: now_s)
    area, height = 0.0, 0
    for change, took_s in steps:
        number.add(change)
        height += change
        now_s += took_s
        area += height * took_s
    assert number.now == height
    assert number.average() == pytest.approx(area / (now_s - 100.0))
    now_s += 2.0
    assert number.average() == height, "what was before it was last asked counts no more"


def test_the_average_over_no_time_is_the_number_itself() -> None:
    number = TimeAverage(lambda: 1.0)
    number.add(4)
    assert number.average() == 4
