"""Highest random weight (rendezvous) hashing: a variant's homes are the groups where its hash is highest.

When a group leaves, only its variants move; no state is kept. Compiled.
"""

from __future__ import annotations

import numpy as np

from controlplane.routing.chance import pair
from controlplane.routing.snapshot import Snapshot
from profiler.compiled import compiled

_11 = np.uint64(11)
_HALVINGS = 60  # no two hashes of 53 bits differ by less


@compiled
def weight(variant: int, key: np.uint64) -> float:
    """The weight of a variant and a group, in [0, 1)."""
    return float(pair(np.uint64(variant), key) >> _11) / 9007199254740992.0


@compiled
def usable_groups(snapshot: Snapshot) -> int:
    count = 0
    for g in range(len(snapshot.groups)):
        count += 1 if snapshot.groups[g].usable else 0
    return count


@compiled
def highest_weight(snapshot: Snapshot, variant: int) -> float:
    """The highest weight of a variant among the usable groups, for one home."""
    highest = 0.0
    for g in range(len(snapshot.groups)):
        if snapshot.groups[g].usable:
            highest = max(highest, weight(variant, snapshot.groups[g].key))
    return highest


@compiled
def least_weight(snapshot: Snapshot, variant: int, homes: int) -> float:
    """The weight from which a usable group is one of `homes` homes. Found by bisection, because there is
    no memory to sort in."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        above = 0
        for g in range(len(snapshot.groups)):
            group = snapshot.groups[g]
            above += 1 if group.usable and weight(variant, group.key) >= middle else 0
        if above == homes:
            return middle
        if above > homes:
            low = middle
        else:
            high = middle
    return low
