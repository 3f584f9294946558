"""Figures for people."""

from __future__ import annotations

from decimal import Decimal

SMALLEST = 1e-4  # below it an exponent is shorter than the zeros


def figure(value: float, digits: int = 3) -> str:
    """So many significant digits. What is large has no exponent: 9052.4 is 9050."""
    text = f"{value:.{digits}g}"
    return f"{Decimal(text):f}" if SMALLEST <= abs(value) < float("inf") else text
