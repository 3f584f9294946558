"""Numbers for people: a limit set to the shown number is met."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.solver.numbers import rounded


@given(value=st.floats(-1e12, 1e12).filter(lambda x: x == 0 or abs(x) > 1e-9))
def test_rounding_stays_on_the_safe_side(value: float) -> None:
    assert rounded(value, up=False) <= value <= rounded(value, up=True)
    assert rounded(value, up=True) == pytest.approx(value, rel=2e-3)
