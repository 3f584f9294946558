"""All that is simulated: requests, what became of them, and engines. Arrays of records; seconds and
tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from controlplane.routing.snapshot import REQUEST, Snapshot
from controlplane.routing.state import RouterState
from profiler.compiled import Records, records
from profiler.step_time.records import BATCH
from workers.scheduling.policy import RUNNING, VARIANTS, WAITING
from workers.scheduling.slots import EMPTY, SLOT

NOBODY = -1

# What is asked. `output` tokens come out, `expected` is what the gateway takes for it.
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

# States of a request.
TO_COME, IN_LINE, SENT, DONE, REFUSED, DROPPED = range(6)

# What became of it. `next`: behind it in the line. `cold`: its variant was not in a slot when it was sent.
OUTCOME = np.dtype(
    [
        ("sent_s", "f8"),
        ("first_s", "f8"),
        ("end_s", "f8"),
        ("group", "i4"),
        ("next", "i4"),
        ("state", "u1"),
        ("cold", "u1"),
    ],
    align=True,
)

# A running row: the policy's fields; the tick at which it ends; prompt tokens to fill, and those of the step.
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
# Waiting in an engine; `generated` tokens were made before it was preempted.
QUEUED = np.dtype(
    [*((name, WAITING[name]) for name in WAITING.names or ()), ("request", "i4"), ("generated", "i4")],
    align=True,
)
# A variant that occurs in an engine: the policy's fields, its number, and how many requests ask it.
OCCURRING = np.dtype(
    [*((name, VARIANTS[name]) for name in VARIANTS.names or ()), ("variant", "i4"), ("requests", "i4")],
    align=True,
)
# Of (engine, variant): its place among those that occur, and its slot.
WHERE = np.dtype([("local", "i4"), ("slot", "i4"), ("rows", "i4"), ("in_host", "i4")], align=True)
LOADED = np.dtype([*((name, SLOT[name]) for name in SLOT.names or ()), ("ready_s", "f8")], align=True)

# An engine. It makes `steps` steps of `step_s` from `start_s` on, until `next_s`; `ticks` counts all steps.
# `reserved`: tokens of KV cache of prompts that are being filled. `batch`: the rows that decode.
ENGINE = np.dtype(
    [
        ("batch", BATCH),
        ("start_s", "f8"),
        ("step_s", "f8"),
        ("next_s", "f8"),
        ("load_free_s", "f8"),
        ("busy_s", "f8"),
        ("reserved", "f8"),
        ("tokens", "f8"),
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
        ("model", "i4"),
        ("fills", "u1"),
    ],
    align=True,
)

# The gateway's line, its counts, and rules of the run.
GATEWAY = np.dtype(
    [("first", "i4"), ("last", "i4"), ("length", "i4"), ("longest", "i4"), ("full", "i4"), ("done", "i8")],
    align=True,
)


class Rules(NamedTuple):
    """`policy` is a number in `controlplane.routing.policies.choose.POLICIES`; `look_ahead`: steps that an
    engine
    has scheduled when a request comes (vLLM: 1). `max_ongoing` requests are sent to a group at once."""

    policy: int
    seed: int
    look_ahead: int
    max_ongoing: int
    tick_s: float
    variant_limit: int
    longest_wait_s: float


class World(NamedTuple):
    """N requests, G engines, V variants; `rows` [G, R], `queue` [G, Q], `occurring` [G, R + Q], `where` [G,
    V],
    `slots` [G, S]. `truth` has the engines' real step times, `seen` what the router knows."""

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


def new_world(asked: Records, truth: Snapshot, seen: Snapshot, state: RouterState, max_ongoing: int) -> World:
    """Idle engines; every variant is in the host's memory where `truth.held.where` says so."""
    groups, variants = truth.held.shape
    rows = int(truth.models.max_rows.max())
    slots = max(1, int(truth.models.slots.max()))
    engines = records(ENGINE, groups)
    engines.next_s = np.inf
    engines.model = truth.groups.model
    where = records(WHERE, (groups, variants))
    where.local = where.slot = NOBODY
    where.in_host = truth.held.where > 0
    loaded = records(LOADED, (groups, slots))
    loaded.variant = EMPTY
    loaded.ready_s = np.inf
    # Slots that a group does not have are busy for ever.
    beyond = np.arange(slots)[None, :] >= truth.models.slots[truth.groups.model][:, None]
    loaded.variant[beyond] = 0
    loaded.busy[beyond] = 1
    outcomes = records(OUTCOME, len(asked))
    outcomes.group = outcomes.next = NOBODY
    gateway = records(GATEWAY, 1)
    gateway.first = gateway.last = NOBODY
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
    )
