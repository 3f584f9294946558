"""The slot for a variant: a free one, or that of the least recently used variant. Pure, compiled."""

from __future__ import annotations

import numpy as np

from profiler.compiled import Records, compiled

EMPTY = -1

# `variant` is EMPTY in a free slot; `used` counts upwards; `busy`: it may not be taken.
SLOT = np.dtype([("used", "i8"), ("variant", "i4"), ("busy", "u1")], align=True)


@compiled
def slot_for(slots: Records) -> int:
    """The first free slot; else the least recently used; EMPTY if there is none."""
    for s in range(len(slots)):
        if slots[s].variant == EMPTY:
            return s
    return least_used(slots)


@compiled
def least_used(slots: Records) -> int:
    """The least recently used slot of those that are taken and not busy; EMPTY if there is none."""
    best = EMPTY
    for s in range(len(slots)):
        free = slots[s].variant == EMPTY
        if not free and not slots[s].busy and (best == EMPTY or slots[s].used < slots[best].used):
            best = s
    return best
