"""The smallest number of groups that a scenario needs for an attainment, by bisection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

# Numbers of groups below the answer that are also tried: measured attainment need not grow with each group.
AROUND = 2


@dataclass(frozen=True)
class Sized:
    """`groups` is None if `most` are not enough. `tried`: attainment by number of groups."""

    groups: int | None
    tried: dict[int, float] = field(default_factory=dict)


def smallest(attainment: Callable[[int], float], wanted: float, start: int, most: int) -> Sized:
    """The least number of groups, of at most `most`, with at least the `wanted` attainment.

    Attainment is assumed to grow with groups. The `AROUND` numbers just below the answer are tried as well,
    and the answer moves down while one of them is enough.
    """
    tried: dict[int, float] = {}

    def enough(groups: int) -> bool:
        if groups not in tried:
            tried[groups] = attainment(groups)
        return tried[groups] >= wanted

    low, high = 0, max(1, min(start, most))
    while not enough(high):
        if high == most:
            return Sized(None, tried)
        low, high = high, min(most, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle
    lower = [groups for groups in range(max(1, high - AROUND), high) if enough(groups)]
    while lower:
        high = lower[0]
        lower = [groups for groups in range(max(1, high - AROUND), high) if enough(groups)]
    return Sized(high, tried)
