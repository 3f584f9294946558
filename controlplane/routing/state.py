"""What a router keeps beside the snapshot: chance, where each variant belongs, what is asked how often."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from controlplane.routing.chance import new_chance
from profiler.compiled import Records, records
from profiler.step_time.records import CLASSES

MAX_HOMES = 16

# The groups where a variant belongs, `count` of them; a policy that has none for it chooses among all.
HOME = np.dtype([("count", "i4"), ("groups", "i4", (MAX_HOMES,))], align=True)

# Of a variant: requests since the last tick, and requests a second
# (`controlplane.routing.placements.demand`).
DEMAND = np.dtype([("recent", "f8"), ("rate", "f8")], align=True)

# Of a class of ranks: since the last tick, and a second: requests, their prompt tokens, what their variants
# add to those; expected output tokens, the same times the context, and times the promised TPOT of each
# request.
CLASS_DEMAND = np.dtype(
    [
        (f"{when}_{what}", "f8")
        for when in ("recent", "rate")
        for what in ("starts", "prompts", "start_s", "tokens", "context", "promise")
    ],
    align=True,
)

# A pool of groups with one ceiling: the rows it needs at once, how many a group holds, and its groups.
POOL = np.dtype([("rows", "f8"), ("each", "f8"), ("groups", "i4"), ("kept", "i4")], align=True)

# One record: `ticks` so far, `next_s` when the next is due, and what the placement moved.
CLOCK = np.dtype([("ticks", "i8"), ("last_s", "f8"), ("next_s", "f8"), ("moves", "i8")], align=True)


class RouterState(NamedTuple):
    """`chance` [1], `homes` [V], `demand` [V], `classes` [CLASSES], `pools` [2, CLASSES] (chosen, and on
    trial), `clock` [1]."""

    chance: Records
    homes: Records
    demand: Records
    classes: Records
    pools: Records
    clock: Records


def new_state(variants: int, seed: int) -> RouterState:
    return RouterState(
        new_chance(seed),
        records(HOME, variants),
        records(DEMAND, variants),
        records(CLASS_DEMAND, CLASSES),
        records(POOL, (2, CLASSES)),
        records(CLOCK, 1),
    )
