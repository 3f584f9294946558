"""The mean of a level, against the sum of its pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.gateway.time_average import Level

STEPS = st.lists(st.tuples(st.integers(-3, 3), st.sampled_from((0.25, 0.5, 3.0))), min_size=1, max_size=20)


@given(STEPS)
def test_it_is_the_area_over_the_time(steps: list[tuple[int, float]]) -> None:
    now_s = 100.0
    level = Level(lambda: now_s)
    area, height = 0.0, 0
    for change, took_s in steps:
        level.add(change)
        height += change
        now_s += took_s
        area += height * took_s
    assert level.now == height
    assert level.average() == pytest.approx(area / (now_s - 100.0))
    now_s += 2.0
    assert level.average() == height, "what was before it was last asked counts no more"


def test_without_time_passing_it_is_the_level() -> None:
    level = Level(lambda: 1.0)
    level.add(4)
    assert level.average() == 4
