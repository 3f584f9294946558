"""A router's state in addition to the snapshot: chance, rates of requests, pools of groups."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from controlplane.routing.chance import new_chance
from profiler.compiled import Records, records
from profiler.step_time.records import CLASSES

# The demand of a class of ranks, since the last tick, and per second
# (`controlplane.routing.placements.demand`). `starts`: requests. `prompts`: their prompt tokens. `start_s`:
# what their variants add to the prompts. `tokens`: expected output tokens. `context` and `promise`: output
# tokens times the context, and times the promised TPOT of each request.
CLASS_DEMAND = np.dtype(
    [
        (f"{when}_{what}", "f8")
        for when in ("recent", "rate")
        for what in ("starts", "prompts", "start_s", "tokens", "context", "promise")
    ],
    align=True,
)

# A pool of groups with one ceiling: the rows that it needs at once, the rows of one group, and its groups.
POOL = np.dtype([("rows", "f8"), ("each", "f8"), ("groups", "i4"), ("kept", "i4")], align=True)

# One record: `ticks` so far, `next_s`: when the next tick is due, and how many groups the placement moved.
CLOCK = np.dtype([("ticks", "i8"), ("last_s", "f8"), ("next_s", "f8"), ("moves", "i8")], align=True)


class RouterState(NamedTuple):
    """`chance` [1], `classes` [CLASSES], `pools` [2, CLASSES] (the chosen pools,
    and the pools on trial), `clock` [1]."""

    chance: Records
    classes: Records
    pools: Records
    clock: Records


def new_state(seed: int) -> RouterState:
    return RouterState(
        new_chance(seed),
        records(CLASS_DEMAND, CLASSES),
        records(POOL, (2, CLASSES)),
        records(CLOCK, 1),
    )
