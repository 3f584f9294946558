"""Numbers for people."""

from __future__ import annotations

import math


def rounded(value: float, *, up: bool) -> float:
    """`value` rounded to four significant digits, only in the given direction."""
    if value == 0 or not math.isfinite(value):
        return value
    step = 10.0 ** (math.floor(math.log10(abs(value))) - 3)
    steps = (math.ceil if up else math.floor)(value / step)
    near = float(f"{steps * step:.10g}")
    if near < value if up else near > value:  # the division rounded to the wrong side
        near = float(f"{(steps + (1 if up else -1)) * step:.10g}")
    return near
