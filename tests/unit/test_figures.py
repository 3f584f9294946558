"""Figures as people read them."""

from __future__ import annotations

import math

import pytest

from profiler.figures import figure


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (9052.4, "9050"),
        (-9052.4, "-9050"),
        (12345678.0, "12300000"),
        (0.27, "0.27"),
        (0.00012345, "0.000123"),
        (0.0, "0"),
        (100.0, "100"),
        (99.96, "100"),
        (1.5e-8, "1.5e-08"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_figures_have_three_digits(value: float, shown: str) -> None:
    assert figure(value) == shown


def test_figures_have_four_digits() -> None:
    assert [figure(value, 4) for value in (410.42, 89123.0)] == ["410.4", "89120"]
