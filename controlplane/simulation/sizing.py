"""How many groups a scenario needs for an attainment: the smallest number, by bisection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

# With groups below the answer that are tried, too: attainment is measured, so it need not grow with each.
AROUND = 2


@dataclass(frozen=True)
class Sized:
    """`groups` is None where `most` are not enough. `tried`: attainment by number of groups."""

    groups: int | None
    tried: dict[int, float] = field(default_factory=dict)


def smallest(attainment: Callable[[int], float], wanted: float, start: int, most: int) -> Sized:
    """The least number of groups, of at most `most`, from which `wanted` is kept.

    Attainment is taken to grow with groups; the `AROUND` numbers next below the answer are tried as well, and
    the answer moves down while one of them is enough.
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
