"""The power of two choices: two random candidates, and of these the one with fewer requests. Compiled.

Every candidate gets a random number from one draw and its key; the two smallest numbers win. Each pair is
equally likely, and the order of the groups does not matter.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from controlplane.routing.chance import pair, uniform
from controlplane.routing.snapshot import Snapshot
from profiler.compiled import Records, compiled


class Two(NamedTuple):
    """Two groups (-1: none) and their random numbers, the smaller one first."""

    first: int
    second: int
    first_number: np.uint64
    second_number: np.uint64


@compiled
def draw(chance: Records) -> np.uint64:
    return np.uint64(uniform(chance) * 9007199254740992.0)


@compiled
def no_groups() -> Two:
    return Two(-1, -1, np.uint64(0), np.uint64(0))


@compiled
def with_candidate(two: Two, g: int, drawn: np.uint64, key: np.uint64) -> Two:
    number = pair(drawn, key)
    if two.first < 0 or number < two.first_number:
        return Two(g, two.first, number, two.first_number)
    if two.second < 0 or number < two.second_number:
        return Two(two.first, g, two.first_number, number)
    return two


@compiled
def fewer_requests(snapshot: Snapshot, two: Two) -> int:
    """The group of the two with fewer requests, the first if they have equally many; -1 if there is none."""
    if two.second < 0:
        return two.first
    fewer = snapshot.groups[two.second].batch.rows < snapshot.groups[two.first].batch.rows
    return two.second if fewer else two.first
