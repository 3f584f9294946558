"""The snapshot that the routing policy reads, kept current as requests go, and the policy's own state. Pure.

`controlplane.routing` decides; this module maintains its input. Each request changes sums in place. When
columns or rows of the snapshot change (new step models, more workers), the sums are computed again from the
requests in flight. Until `make` is called there is no snapshot, and the other methods do nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from hashlib import blake2b
from random import getrandbits
from typing import NamedTuple

import numpy as np

from controlplane.routing import bookkeeping
from controlplane.routing.dispatch import adjust, dispatch, resend
from controlplane.routing.orders import invalidate
from controlplane.routing.placements.tick import tick
from controlplane.routing.snapshot import (
    ELSEWHERE,
    GROUP,
    IN_HOST_MEMORY,
    IN_SLOT,
    LOADING,
    NO_PROMISE,
    REQUEST,
    RequestRow,
    Snapshot,
    new_snapshot,
    promise_class,
)
from controlplane.routing.state import new_state
from controlplane.traffic.machine_code import first_record, machine_code
from controlplane.traffic.member import Member
from controlplane.traffic.member_set import MemberSet, StepModels
from profiler.compiled import Records, records
from profiler.step_time.correction import corrected, error
from profiler.step_time.records import MAX_ROWS, STEP_MODEL
from workers.messages import WorkerLoad
from workers.tiers import Tier

_MANY = 1 << 30
_SPARE = 16
_TIERS = {Tier.DEVICE: IN_SLOT, Tier.HOST: IN_HOST_MEMORY, Tier.DISK: ELSEWHERE}


class _Learned(NamedTuple):
    """What was learned of one engine: the correction of step times, their stretch, and the ceiling."""

    correction: float = 1.0
    stretch: float = 1.0
    ceiling: int = 99


class _StepTimes(NamedTuple):
    """[models] the step models, [models, variants] the variants in them, and each variant uid's column."""

    models: Records
    variants: Records
    columns: dict[int, int]


class LiveSnapshot:
    """The snapshot of one base in one gateway."""

    def __init__(self) -> None:
        self._models: StepModels | None = None
        self._columns: dict[int, int] = {0: 0}  # of the snapshot, by the variant's uid
        self._row = records(REQUEST, 1)
        self._record = first_record(self._row, REQUEST)
        self._snapshot: Snapshot | None = None
        self._state = new_state(getrandbits(63))

    @property
    def snapshot(self) -> Snapshot | None:
        """What the policy reads; None until `make`."""
        return self._snapshot

    # --- members -------------------------------------------------------------------------------------------

    def set_members(self, members: MemberSet, fresh: Iterable[Member]) -> None:
        """Workers were added: `fresh` are new among `members`."""
        if self._snapshot is not None and members.slots > len(self._snapshot.groups):
            self.make(members)
        else:
            for member in fresh:
                self._enter(member)

    def _enter(self, member: Member) -> None:
        if self._snapshot is None:
            return
        group = self._snapshot.groups[member.slot]
        group.correction, group.stretch, group.tightest, group.ceiling = 1.0, 1.0, NO_PROMISE, 99
        group.key, group.model, group.healthy = hashed(member.group or member.name), member.model, 1
        group.usable = int(member.has_room)
        invalidate(self._snapshot)

    def leave(self, slot: int) -> None:
        """The worker in this slot has left."""
        if self._snapshot is not None:
            self._snapshot.groups[slot] = np.zeros((), GROUP)
            self._snapshot.held[:, slot] = 0
            invalidate(self._snapshot)

    def set_usable(self, member: Member, has_room: bool) -> None:
        if self._snapshot is not None and self._snapshot.orders.size:
            bookkeeping.set_usable(self._snapshot, member.slot, has_room)
        elif self._snapshot is not None:
            self._usable[member.slot] = has_room  # faster than a call of compiled code

    # --- requests ------------------------------------------------------------------------------------------

    def promise_of(self, tpot_s: float | None) -> int:
        """The class of a promised TPOT; NO_PROMISE while there is no snapshot."""
        return NO_PROMISE if tpot_s is None or self._snapshot is None else promise_class(tpot_s)

    def choose(self, row: RequestRow, is_new: bool) -> int:
        """The slot that the policy sends the request to, which is noted as sent; -1: the policy chose none,
        and nothing was noted."""
        if self._snapshot is None:
            return -1
        self._row[0] = row
        slot = self._dispatch(self._snapshot, self._record, self._state, is_new)
        if slot >= 0 and row.variant and self._where[row.variant, slot] < LOADING:
            self._where[row.variant, slot] = LOADING
        return slot

    def sent(self, slot: int, row: RequestRow) -> None:
        """Note a request that was sent without the policy."""
        if self._snapshot is not None:
            self._row[0] = row
            bookkeeping.sent(self._snapshot, slot, self._record)

    def add(self, slot: int, row: RequestRow, rows: int) -> None:
        """Add `rows` sequences next to a request's first (remove, if negative): they share its prompt, which
        is prefilled once."""
        if rows and self._snapshot is not None:
            self._row[0] = row
            adjust(self._snapshot, slot, self._record, rows)

    def filled(self, slot: int, row: RequestRow) -> None:
        """The request's first token came."""
        if self._snapshot is not None:
            self._row[0] = row
            self._filled(self._snapshot, slot, self._record)
            if row.variant:
                self._where[row.variant, slot] = IN_SLOT

    def ended(self, slot: int, row: RequestRow, filled: bool, rows: int) -> None:
        """The request of `rows` sequences ended; `filled`: its first token had come."""
        if self._snapshot is not None:
            self._row[0] = row
            self._ended(self._snapshot, slot, self._record, filled)
            self.add(slot, row, 1 - rows)

    # --- what workers report -------------------------------------------------------------------------------

    def place_variants(self, member: Member) -> None:
        """Note where the worker has variants. A requested variant that is in no slot is loading."""
        if self._snapshot is None:
            return
        held = self._snapshot.held[:, member.slot]
        where = np.full(len(held), ELSEWHERE, np.int32)
        for uid, tier in member.variants:
            column = self._columns.get(uid)
            if column is not None:
                where[column] = _TIERS[Tier(tier)]
        where[(held.rows > 0) & (where < LOADING)] = LOADING
        held.where = where

    def correct(self, member: Member, load: WorkerLoad) -> None:
        """Correct predicted step times by those that the worker measured."""
        if self._snapshot is None or self._models is None:
            return
        group = self._snapshot.groups[member.slot]
        before_s, member.tpot_s = member.tpot_s, float(group.tpot_s)
        seen = [seconds for seconds in (before_s, member.tpot_s) if seconds > 0]
        if not seen or load.steps <= 0:
            return
        predicted_s = sum(seen) / len(seen)
        observed_s, steps = load.steps * load.step_s, float(load.steps)
        member.error = float(error(member.error, observed_s, predicted_s, steps))
        group.correction = corrected(float(group.correction), observed_s, predicted_s, steps)
        bookkeeping.renew(self._snapshot, member.slot)
        member.tpot_s = float(group.tpot_s)

    def note_cached(self, member: Member, load: WorkerLoad) -> None:
        """Learn how the lengths of the worker's requests differ from the expected ones. While requests wait
        in its engine, the KV cache does not hold all of them, so its usage is ignored."""
        if self._snapshot is None or self._models is None or load.waiting:
            return
        tokens = load.kv_usage * float(self._snapshot.models[member.model].kv_tokens)
        bookkeeping.cached(self._snapshot, member.slot, tokens)

    def tick(self, since_s: float) -> None:
        """Let the policy place variants again, `since_s` after the router began."""
        if self._snapshot is not None:
            tick(self._snapshot, self._state, since_s)

    # --- making the snapshot -------------------------------------------------------------------------------

    def learn(self, models: StepModels | None, members: MemberSet) -> None:
        """Step times from now on; None: nothing is known of steps."""
        self._models = models
        if self._snapshot is not None:
            self.make(members)

    def column(self, uid: int, members: MemberSet) -> int:
        """The column of a variant (0: the base), which it gets now if it had none."""
        column = self._columns.get(uid)
        if column is None:
            if self._snapshot is not None and len(self._columns) >= self._snapshot.held.shape[0]:
                self.make(members, {routed.request.variant for routed in members.routed()})
            column = self._columns[uid] = max(self._columns.values()) + 1
            for member in members:
                if any(uid == there for there, _ in member.variants):
                    self.place_variants(member)
        return column

    def make(self, members: MemberSet, keep: Iterable[int] | None = None) -> None:
        """Make the snapshot from the members, the step models and the requests in flight.

        Variants without a step model keep a column while they are in `keep` (None: all of them keep it).
        """
        models, variants, columns = self._step_times()
        for uid in self._columns if keep is None else keep:
            if uid not in columns:
                columns[uid] = max(columns.values()) + 1
        width = max(columns.values()) + 1 + max(_SPARE, len(columns))
        learned = {member: self._learned(member) for member in members}
        snapshot = new_snapshot(max(4, 2 * members.slots), width, models)
        snapshot.variants[:, : variants.shape[1]] = variants
        snapshot.groups.usable = snapshot.groups.healthy = 0
        self._snapshot, self._columns = snapshot, columns
        self._where, self._usable = np.asarray(snapshot.held.where), np.asarray(snapshot.groups.usable)
        self._dispatch = machine_code(dispatch, snapshot, self._record, self._state, True)
        self._filled = machine_code(bookkeeping.filled, snapshot, 0, self._record)
        self._ended = machine_code(bookkeeping.ended, snapshot, 0, self._record, True)
        for member in members:
            self._enter(member)
            group = snapshot.groups[member.slot]
            group.correction, group.stretch, group.ceiling = learned[member]
        self._resend(snapshot, members)
        for member in members:
            self.place_variants(member)

    def _learned(self, member: Member) -> _Learned:
        if self._snapshot is None or member.slot >= len(self._snapshot.groups):
            return _Learned()
        group = self._snapshot.groups[member.slot]
        return _Learned(float(group.correction) or 1.0, float(group.stretch) or 1.0, int(group.ceiling))

    def _step_times(self) -> _StepTimes:
        """The step times in our own memory, so that compiled code sees one kind of array."""
        if self._models is None:
            models = equal_rows()
            return _StepTimes(models, new_snapshot(0, 1, models).variants, {0: 0})
        models = records(STEP_MODEL, len(self._models.models))
        models[:] = self._models.models
        return _StepTimes(models, self._models.variants, {0: 0, **self._models.variant_rows})

    def _resend(self, snapshot: Snapshot, members: MemberSet) -> None:
        """Note the requests in flight in the new snapshot."""
        in_flight = members.routed()
        requests = records(REQUEST, len(in_flight))
        slots, filled = np.zeros(len(in_flight), np.int64), np.zeros(len(in_flight), np.bool_)
        for i, routed in enumerate(in_flight):
            promise = NO_PROMISE if math.isinf(routed.row.tpot_s) else promise_class(routed.row.tpot_s)
            routed.row = routed.row._replace(variant=self._columns[routed.request.variant], promise=promise)
            requests[i], slots[i], filled[i] = routed.row, routed.member.slot, routed.filled
        resend(snapshot, requests, slots, filled)
        for routed in in_flight:
            self.add(routed.member.slot, routed.row, routed.request.terms.sequences - 1)
        for member in members:
            if member.typical is not None:
                self.add(member.slot, member.typical, member.foreign)


def equal_rows() -> Records:
    """[1], a step model in which every row costs the same, and nothing else costs anything: without knowledge
    the cheapest worker is the worker with the fewest requests."""
    model = records(STEP_MODEL, 1)
    model.decode_s[:] = 1e-3 * np.arange(MAX_ROWS + 1)
    model.prefill_grain = 1.0
    model.batched_tokens = model.max_rows = model.kv_tokens = model.slots = _MANY
    return model


def hashed(text: str) -> int:
    """63 bits, the same in every process, and not 0."""
    return int.from_bytes(blake2b(text.encode(errors="replace"), digest_size=8).digest()) >> 1 | 1
