"""A router's input: the worker groups of one base, and the properties of each request that affect routing.

All of it lies in arrays of records. A gateway keeps one `Snapshot` for each base and changes it in place
(`controlplane.routing.bookkeeping`); a policy reads it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from profiler.compiled import Records, compiled, records
from profiler.step_time.records import BATCH, VARIANT

# Promises of TPOT are counted by class, 2% apart: a promise counts as the lower end of its class.
PROMISES = 512
SHORTEST_PROMISE_S = 0.5e-3
PROMISE_RATIO = 1.02
NO_PROMISE = PROMISES - 1
_PROMISED_S = SHORTEST_PROMISE_S * PROMISE_RATIO ** np.arange(PROMISES)

# Where a variant is, from the point of view of a group.
ELSEWHERE, IN_HOST_MEMORY, LOADING, IN_SLOT = range(4)

# A worker group. `batch` sums over all requests that were sent there and have not ended, with each request's
# prompt and half of its expected output as context; `unfilled` are those of their prompt tokens that no step
# has filled yet. `distinct`: variants in the batch. `promises` counts rows by class of promised TPOT, and
# `tightest` is the first class that occurs. Cached: `step_s`, a step in which the whole batch decodes, and
# `tpot_s`, the same plus the prompts of others between two steps. For that, `starts` sums 1 / output over the
# rows, `start_tokens` prompt / output, and `start_s` what their variants add to the prompts / output.
# `correction`: observed steps over predicted ones. `stretch`: tokens seen in the KV cache over the batch's
# context: long outputs keep more tokens there than expected. `ceiling`: the largest class of ranks that
# belongs here, if kernels pad. `healthy`: it serves; `usable`: it serves, and has room for one more request.
# `key` stands for the group's name wherever chance or ties decide, so the order of groups does not.
GROUP = np.dtype(
    [
        ("batch", BATCH),
        ("unfilled", "f8"),
        ("step_s", "f8"),
        ("starts", "f8"),
        ("start_tokens", "f8"),
        ("start_s", "f8"),
        ("tpot_s", "f8"),
        ("correction", "f8"),
        ("stretch", "f8"),
        ("key", "u8"),
        ("model", "i4"),
        ("distinct", "i4"),
        ("tightest", "i4"),
        ("ceiling", "i4"),
        ("usable", "u1"),
        ("healthy", "u1"),
        ("promises", "i4", (PROMISES,)),
    ],
    align=True,
)

# A variant in a group: the group's rows that use it, and where it is.
HELD = np.dtype([("rows", "i4"), ("where", "i4")], align=True)

# A request. Lengths in tokens (`output` is expected), promises in seconds (infinite: none); `waited_s` since
# its arrival. `session` and `prefix` are hashes, 0 for none; `key` is the request's own random number. The
# group `home` may have the first `cached` tokens of its prompt in its KV cache; 0: no group has any.
REQUEST = np.dtype(
    [
        ("variant", "i8"),
        ("prompt", "f8"),
        ("output", "f8"),
        ("ttft_s", "f8"),
        ("tpot_s", "f8"),
        ("waited_s", "f8"),
        ("session", "u8"),
        ("prefix", "u8"),
        ("key", "u8"),
        ("cached", "f8"),
        ("home", "i4"),
        ("promise", "i4"),
    ],
    align=True,
)


class RequestRow(NamedTuple):
    """The fields of `REQUEST` as Python values, in the same order and units."""

    variant: int
    prompt: float
    output: float
    ttft_s: float
    tpot_s: float
    waited_s: float
    session: int
    prefix: int
    key: int
    cached: float
    home: int
    promise: int


# Up to this number of groups, a policy considers all.
LOOK_AT_ALL = 64
ORDERS = 3
# Records [order, n] hold two things (`controlplane.routing.orders`). The first is the `group` at place n. The
# second is about group n: its `place`, and its sort keys `shelf`, `key`, `tie`. The first order also has the
# n-th `candidate` of a pick, and the number of the last pick that had group n as a candidate (`picks_seen`).
# Its first record counts `picks`.
ORDER = np.dtype(
    [
        ("key", "f8"),
        ("tie", "u8"),
        ("picks", "i8"),
        ("picks_seen", "i8"),
        ("shelf", "i4"),
        ("group", "i4"),
        ("place", "i4"),
        ("candidate", "i4"),
    ],
    align=True,
)


class Snapshot(NamedTuple):
    """`groups` [G], `held` [V, G], `models` [M] (profiler.step_time), `variants` [M, V]; variant 0 is the
    base. `orders` [ORDERS, G], or [ORDERS, 0] for at most LOOK_AT_ALL groups."""

    groups: Records
    held: Records
    models: Records
    variants: Records
    orders: Records


def new_snapshot(groups: int, variants: int, models: Records) -> Snapshot:
    """A snapshot of idle groups, all of the first model, and of variants that cost nothing; to be filled
    in."""
    made = records(GROUP, groups)
    made.correction = made.stretch = 1.0
    made.usable = made.healthy = 1
    made.tightest = NO_PROMISE
    made.key = np.arange(1, groups + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    made.ceiling = 99
    known = records(VARIANT, (len(models), variants))
    known.kind = -1
    ordered = groups if groups > LOOK_AT_ALL else 0
    return Snapshot(made, records(HELD, (variants, groups)), models, known, records(ORDER, (ORDERS, ordered)))


@compiled
def promise_class(tpot_s: float) -> int:
    """The class of a promised TPOT; NO_PROMISE if it is infinite, or longer than any class."""
    if not tpot_s < SHORTEST_PROMISE_S * PROMISE_RATIO ** (NO_PROMISE - 1):
        return NO_PROMISE
    if tpot_s <= SHORTEST_PROMISE_S:
        return 0
    return int(math.log(tpot_s / SHORTEST_PROMISE_S) / math.log(PROMISE_RATIO) + 1e-9)


@compiled
def promised_s(number: int) -> float:
    """The TPOT of a class."""
    if number >= NO_PROMISE:
        return math.inf
    return _PROMISED_S[max(0, number)]  # type: ignore[no-any-return]
