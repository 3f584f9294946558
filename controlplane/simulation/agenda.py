"""The engine whose steps end next, found by a tournament, without looking at all engines. Compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from profiler.compiled import Records, compiled


def new_agenda(engines: int) -> tuple[Records, Records]:
    """Times [L] of the engines' next ends, none yet, and the tournament [2 L]; L is at least `engines`."""
    leaves = 1 << max(0, engines - 1).bit_length()
    winners: Any = np.zeros(2 * leaves, np.int32)
    winners[leaves:] = np.arange(leaves)
    for node in range(leaves - 1, 0, -1):
        winners[node] = winners[2 * node]
    return np.full(leaves, np.inf), winners


@compiled
def schedule(next_s: Records, winners: Records, g: int, at_s: float) -> None:
    """The steps of engine `g` end at `at_s`. Among equal times the engine with the lowest number is first."""
    next_s[g] = at_s
    node = (len(next_s) + g) // 2
    while node >= 1:
        left, right = winners[2 * node], winners[2 * node + 1]
        winners[node] = right if next_s[right] < next_s[left] else left
        node //= 2


@compiled
def first(winners: Records) -> int:
    """The engine whose steps end next."""
    return winners[1]  # type: ignore[no-any-return]
