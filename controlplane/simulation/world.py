"""The state of a simulation: requests, their outcomes, and engines. Arrays of records; seconds and
tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from controlplane.routing.snapshot import REQUEST, Snapshot
from controlplane.routing.state import RouterState
from controlplane.simulation.agenda import new_agenda
from profiler.compiled import Records, records
from profiler.step_time.records import BATCH
from workers.scheduling.policy import RUNNING, VARIANTS, WAITING
from workers.scheduling.slots import EMPTY, SLOT

NO_INDEX = -1

# A request. It generates `output` tokens; `expected` is the gateway's expectation of that.
ASKED = np.dtype(
    [
        ("arrival_s", "f8"),
        ("ttft_s", "f8"),
        ("tpot_s", "f8"),
        ("expected", "f8"),
        ("session", "u8"),
        ("variant", "i4"),
        ("prompt", "i4"),
        ("output", "i4"),
        ("priority", "i4"),
        ("tenant", "i4"),
    ],
    align=True,
)

# States of a request. REFUSED: before it was sent, for one of the reasons; DROPPED: it was late, and was to
# be dropped then.
TO_COME, IN_LINE, SENT, DONE, REFUSED, DROPPED = range(6)
# Reasons: it would be late; the queue, or its tenant's places, are full; another request displaced it; it is
# late.
NO_REASON, WOULD_BE_LATE, LINE_FULL, TENANT_FULL, DISPLACED, LATE = range(6)

# The outcome of a request. `cold`: its variant was not in a slot when it was sent.
OUTCOME = np.dtype(
    [
        ("sent_s", "f8"),
        ("first_s", "f8"),
        ("end_s", "f8"),
        ("group", "i4"),
        ("state", "u1"),
        ("reason", "u1"),
        ("cold", "u1"),
    ],
    align=True,
)

# A running row: the policy's fields; the tick at which it ends; prompt tokens to fill in all, and in this
# step.
ROW = np.dtype(
    [
        *((name, RUNNING[name]) for name in RUNNING.names or ()),
        ("ends_at", "i8"),
        ("request", "i4"),
        ("unfilled", "i4"),
        ("chunk", "i4"),
        ("generated", "i4"),
    ],
    align=True,
)
# A request that waits in an engine; `generated` tokens were made before it was preempted. Steps that were
# scheduled before its arrival run until `due` of the engine's `ticks` are done.
QUEUED = np.dtype(
    [
        *((name, WAITING[name]) for name in WAITING.names or ()),
        ("due", "i8"),
        ("request", "i4"),
        ("generated", "i4"),
    ],
    align=True,
)
# A variant that occurs in an engine: the policy's fields, its number, and the number of its requests.
OCCURRING = np.dtype(
    [*((name, VARIANTS[name]) for name in VARIANTS.names or ()), ("variant", "i4"), ("requests", "i4")],
    align=True,
)
# For (engine, variant): its place among those that occur, its slot, whether it is in the host's memory, and
# its neighbours in the order of use.
WHERE = np.dtype(
    [(name, "i4") for name in ("local", "slot", "rows", "in_host", "older", "newer")], align=True
)
LOADED = np.dtype([*((name, SLOT[name]) for name in SLOT.names or ()), ("ready_s", "f8")], align=True)

# An engine. From `start_s` on it makes `steps` steps. The first takes `step_s`, and each later one `growth_s`
# longer than the previous one; `ticks` counts all steps. `reserved`: tokens of KV cache of prompts that are
# being filled. `batch`: the rows that decode. `ahead`: a variant that is read into the host's memory before
# it has a slot, and is there at `ahead_s`.
ENGINE = np.dtype(
    [
        ("batch", BATCH),
        ("start_s", "f8"),
        ("step_s", "f8"),
        ("growth_s", "f8"),
        ("load_free_s", "f8"),
        ("ahead_s", "f8"),
        ("busy_s", "f8"),
        ("reserved", "f8"),
        ("tokens", "f8"),
        ("host_bytes", "f8"),
        ("host_limit", "f8"),
        ("ticks", "i8"),
        ("steps", "i8"),
        ("clock", "i8"),
        ("keys", "i8"),
        ("loads", "i8"),
        ("preemptions", "i8"),
        ("skips", "i8"),
        ("running", "i4"),
        ("waiting", "i4"),
        ("occurring", "i4"),
        ("loading", "i4"),
        ("oldest", "i4"),
        ("newest", "i4"),
        ("ahead", "i4"),
        ("model", "i4"),
        ("fills", "u1"),
    ],
    align=True,
)

# The simulation's progress, and the gateway's counts. `coming`: the next request to arrive. Requests from
# `unseen` up to it found no room, and the queue has not decided about them yet. `length` requests wait, or
# may have to; `room`: how many more requests usable groups can take; `full` groups have no room. `stepping`:
# an engine whose steps have ended, and whose next steps wait until the queue has moved.
GATEWAY = np.dtype(
    [
        ("now_s", "f8"),
        ("next_tick_s", "f8"),
        ("coming", "i8"),
        ("unseen", "i8"),
        ("length", "i8"),
        ("longest", "i8"),
        ("room", "i8"),
        ("done", "i8"),
        ("full", "i4"),
        ("stepping", "i4"),
    ],
    align=True,
)


class Rules(NamedTuple):
    """`policy` is a number in `controlplane.baselines.routing.choose.POLICIES`; `look_ahead`: steps that an
    engine has scheduled when a request arrives (vLLM: 1). At most `max_ongoing` requests are at a group at
    once.
    """

    policy: int
    seed: int
    look_ahead: int
    max_ongoing: int
    tick_s: float
    variant_limit: int
    longest_wait_s: float
    almost_done_tokens: int = 8


class World(NamedTuple):
    """N requests, G engines, V variants; `rows` [G, R], `queue` [G, Q], `occurring` [G, R + Q], `where`
    [G, V], `slots` [G, S]. `truth` has the engines' real step times, `seen` what the router knows. `next_s`
    and `winners` are the agenda of the engines' steps (`controlplane.simulation.agenda`).
    """

    asked: Records
    outcomes: Records
    engines: Records
    rows: Records
    queue: Records
    occurring: Records
    where: Records
    slots: Records
    truth: Snapshot
    seen: Snapshot
    state: RouterState
    gateway: Records
    request: Records
    next_s: Records
    winners: Records


def new_world(asked: Records, truth: Snapshot, seen: Snapshot, state: RouterState, max_ongoing: int) -> World:
    """Idle engines; a variant is in the host's memory if `truth.held.where` says so."""
    variants, groups = truth.held.shape
    rows = int(truth.models.max_rows.max())
    slots = max(1, int(truth.models.slots.max()))
    engines = records(ENGINE, groups)
    engines.host_limit = np.inf
    engines.oldest = engines.newest = engines.ahead = NO_INDEX
    engines.model = truth.groups.model
    where = records(WHERE, (groups, variants))
    where.local = where.slot = where.older = where.newer = NO_INDEX
    where.in_host = truth.held.where.T > 0
    loaded = records(LOADED, (groups, slots))
    loaded.variant = EMPTY
    loaded.ready_s = np.inf
    # Slots that a group does not have are always busy.
    beyond = np.arange(slots)[None, :] >= truth.models.slots[truth.groups.model][:, None]
    loaded.variant[beyond] = 0
    loaded.busy[beyond] = 1
    outcomes = records(OUTCOME, len(asked))
    outcomes.group = NO_INDEX
    gateway = records(GATEWAY, 1)
    gateway.stepping = NO_INDEX
    return World(
        asked,
        outcomes,
        engines,
        records(ROW, (groups, rows)),
        records(QUEUED, (groups, max_ongoing + rows)),
        records(OCCURRING, (groups, max_ongoing + 2 * rows + 1)),
        where,
        loaded,
        truth,
        seen,
        state,
        gateway,
        records(REQUEST, 1),
        *new_agenda(groups),
    )


def new_asked(count: int) -> Records:
    """[count], to be filled in."""
    return records(ASKED, count)


def room_for_ended(world: World) -> Records:
    """Records for as many requests as can end in one step (`controlplane.simulation.run.run`)."""
    return records(ROW, world.rows.shape[1])
