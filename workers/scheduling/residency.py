"""The slots of variants on each rank, as the scheduler knows them. Pure: no I/O, no clock.

The scheduler chooses the same slots for all ranks; ranks report when they are done. A variant may run once
every rank has it in its slot. Being on its way is enough if steps wait for it on the device; such a rank may
still report a failure. Without a free slot, or with too little memory, variants that no batch in flight uses
leave their slots: `eviction` chooses them. A variant fits on a rank's device if the free bytes are enough in
total, since the rank moves variants. Every order to the ranks has a number, which their reports repeat. Only
a report of the newest order about a variant describes the current state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from profiler.compiled import records
from workers.scheduling.eviction import Idle, victims
from workers.scheduling.policy import ABSENT, LOADING, NO_MEMORY, READY
from workers.scheduling.slots import EMPTY, SLOT, slot_for

PLACE, PREPARE, CLEAR, FORGET = "place", "prepare", "clear", "forget"
PLACED, PREPARED, NO_ROOM, FAILED = "placed", "prepared", "no_room", "failed"


@dataclass
class Variant:
    """A known variant.

    `device` has the bytes in the slot by rank, `needs` the bytes required there, once known; `slot` is its
    slot.
    """

    uid: int
    path: str
    slot: int | None = None
    device: dict[int, int] = field(default_factory=dict)
    needs: dict[int, int] = field(default_factory=dict)
    placing: int = 0  # the newest order to place it
    unplaced: set[int] = field(default_factory=set)  # ranks that have not answered that order
    preparing: int = 0
    unprepared: set[int] = field(default_factory=set)
    # ranks that have not answered that order, with success or failure
    reading: set[int] = field(default_factory=set)
    error: str = ""
    fault: str = ""  # the kind of the failure (`faults.Fault`)
    no_memory: bool = False  # some rank has no room for it
    ahead: bool = False  # it was read ahead since it was last placed
    streams: bool = False  # from host memory it may run as soon as its copy has begun


@dataclass
class _ReadAhead:
    """The newest order to read a variant ahead, and the ranks that have not answered it."""

    uid: int = 0
    order: int = 0
    ranks: set[int] = field(default_factory=set)


class Residency:
    """Slots 0 .. `slots` - 1 on `ranks` ranks. Messages for all ranks are collected in `outbox`."""

    def __init__(self, slots: int, ranks: int) -> None:
        self.slots = slots
        self._ranks = frozenset(range(ranks))
        self._variants: dict[int, Variant] = {}
        self._in_slot: dict[int, int] = {}  # uid by slot, in the order in which slots were given
        self._slots = records(SLOT, slots).view(np.ndarray)
        self._slots["variant"] = EMPTY
        slot_for(self._slots)  # compiled, or read from the cache, before the first request
        self._capacity: dict[int, int] = {}  # by rank: bytes for the variants in slots together
        self._host: dict[int, dict[int, int]] = {}  # by rank: bytes by uid
        self._staying: dict[int, dict[int, int]] = {}  # the same, for variants in a slot but not in `_host`
        self._failing: set[int] = set()
        self._departing: set[int] = set()
        # failed after steps might use them; they keep their slots until no step does
        self._lost: set[int] = set()
        self._ahead = _ReadAhead()
        self._clock = 0
        self._orders = 0
        self.outbox: list[dict[str, Any]] = []

    # --- the scheduler's queries ---------------------------------------------------------------

    def readiness(self, uid: int) -> int:
        """READY, LOADING, ABSENT or NO_MEMORY."""
        variant = self._variants.get(uid)
        if variant is None:
            return ABSENT
        if variant.slot is not None and len(variant.device) == len(self._ranks):
            return READY
        if variant.no_memory:
            return NO_MEMORY
        return ABSENT if variant.slot is None else LOADING

    def soon(self, uid: int) -> bool:
        """Whether the ranks will very soon report that it may run.

        It is on its way to a slot from the host memory of all ranks, and they do not wait for that copy.
        """
        variant = self._variants.get(uid)
        return variant is not None and bool(variant.unplaced) and variant.streams and self._in_host(uid)

    def size_bytes(self, uid: int) -> int:
        """The bytes of a variant on the rank where it takes most; 0 while no rank has it."""
        variant = self._variants.get(uid)
        return max(variant.device.values(), default=0) if variant else 0

    def error(self, uid: int) -> str:
        """Why a variant cannot be loaded; empty if it may be tried."""
        return self._variants[uid].error if uid in self._failing else ""

    def fault(self, uid: int) -> str:
        """The kind of the failure; empty without one."""
        return self._variants[uid].fault if uid in self._failing else ""

    @property
    def failing(self) -> bool:
        """Whether there is a variant that cannot be loaded."""
        return bool(self._failing)

    def take_failures(self) -> dict[int, str]:
        """Take the errors by variant. This forgives them: the next request tries again."""
        errors = {uid: self._variants[uid].error for uid in self._failing}
        self._failing.clear()
        return errors

    def touch(self, uids: Collection[int]) -> None:
        """Record that these variants are used now. Between two, the variant with the older slot counts as
        used earlier.
        """
        for slot, uid in self._in_slot.items():
            if uid in uids:
                self._use(slot)

    def _use(self, slot: int) -> None:
        self._clock += 1
        self._slots["used"][slot] = self._clock

    def load(self, uid: int, path: str, busy: frozenset[int]) -> bool:
        """Put a variant into a slot, with room in every rank's memory; others that are not `busy` leave if
        needed.

        False while not enough of them can leave.
        """
        variant = self._variant(uid, path)
        if variant.slot is not None and (variant.unplaced or not variant.no_memory):
            return True  # on its way, or there
        if variant.slot is not None:
            return self._make_room(variant, busy) and self._place(variant, variant.slot)
        slot = self._slot_with_room(variant, busy)
        if slot is None:
            return False
        variant.slot, variant.no_memory, self._in_slot[slot] = slot, False, uid
        self._slots["variant"][slot] = uid
        return self._place(variant, slot)

    def prepare(self, uid: int, path: str) -> None:
        """Make the ranks read and check a requested variant. Starts again after an error."""
        variant = self._variant(uid, path)
        self._departing.discard(uid)
        self.forgive(uid)
        variant.error = ""
        variant.preparing = self._order({"do": PREPARE, "uid": uid, "path": path})
        variant.unprepared, variant.reading = set(self._ranks), set(self._ranks)

    def read_ahead(self, uid: int, path: str) -> None:
        """Load a variant into host memory while it waits for others to leave their slots, so that its slot
        need not wait for a disk.

        One variant is read ahead at a time, since more could evict each other from host memory, and once for
        each slot that it gets. Its result is reported when it is placed.
        """
        variant = self._variant(uid, path)
        if self._ahead.ranks or variant.ahead or variant.slot is not None or self._in_host(uid):
            return
        variant.ahead = True
        order = self._order({"do": PREPARE, "uid": uid, "path": path})
        self._ahead = _ReadAhead(uid, order, set(self._ranks))

    def _variant(self, uid: int, path: str) -> Variant:
        variant = self._variants.setdefault(uid, Variant(uid, path))
        variant.path = path
        return variant

    def forget(self, uid: int) -> None:
        """Mark a variant that no new request will name: `let_go` removes it once no request needs it."""
        if uid in self._variants:
            self._departing.add(uid)

    @property
    def departing(self) -> bool:
        return bool(self._departing)

    def let_go(self, wanted: frozenset[int]) -> None:
        """Remove the marked variants, except the `wanted`, from their slots and every rank's memory.

        Variants that some rank still reads are removed later: the rank would keep them, and the clients that
        asked for them would get no answer.
        """
        reading = {uid for uid in self._departing if self._variants[uid].reading}
        if self._ahead.ranks:
            reading.add(self._ahead.uid)
        for uid in self._departing - wanted - reading:
            leaving = self._variants.pop(uid)
            if leaving.slot is not None:
                self._clear(leaving)
            self._order({"do": FORGET, "uid": uid})
            self._failing.discard(uid)
            for held in (*self._host.values(), *self._staying.values()):
                held.pop(uid, None)
        self._departing &= wanted | reading

    @property
    def lost(self) -> bool:
        """Whether a variant has failed after steps might use it."""
        return bool(self._lost)

    def give_up(self, in_use: Collection[int]) -> None:
        """Remove lost variants from their slots, except those that steps in flight use."""
        for uid in self._lost - set(in_use):
            self._clear(self._variants[uid])

    def prepared(self, uid: int) -> bool:
        """True once every rank has read it for `prepare`, or it may run anyway."""
        variant = self._variants.get(uid)
        if variant is None:
            return False
        read = variant.preparing > 0 and not variant.unprepared
        return read or self.readiness(uid) == READY

    def forgive(self, uid: int) -> None:
        """Forget an error: the next request tries again."""
        self._failing.discard(uid)

    # --- what the ranks report -----------------------------------------------------------------

    def has_room(self, rank: int, capacity_bytes: int) -> None:
        """Record a rank's bytes for the variants in slots together."""
        self._capacity[rank] = capacity_bytes

    def reported(self, rank: int, message: Mapping[str, Any]) -> None:
        """Record the result of a PREPARE or PLACE on a rank, and the variant's bytes on its device.

        `host` has everything in host memory, `staying` the host memory of variants that are only in slots.
        """
        self._host[rank] = {int(uid): size for uid, size in message["host"].items()}
        self._staying[rank] = {int(uid): size for uid, size in message.get("staying", {}).items()}
        variant = self._variants.get(message["uid"])
        if variant is not None and "bytes" in message:
            variant.needs[rank] = message["bytes"]
        if message.get("order") == self._ahead.order:
            self._ahead.ranks.discard(rank)
            return
        if variant is None:
            return
        if message.get("slot") is None:
            self._prepare_reported(variant, rank, message)
        elif message["slot"] == variant.slot and message.get("order", variant.placing) == variant.placing:
            self._place_reported(variant, rank, message)

    def _prepare_reported(self, variant: Variant, rank: int, message: Mapping[str, Any]) -> None:
        if message.get("order", variant.preparing) != variant.preparing:
            return
        variant.reading.discard(rank)
        if message["did"] == PREPARED:
            variant.streams = message.get("streams", False)
            variant.unprepared.discard(rank)
        elif self.readiness(variant.uid) != READY:  # a running variant does not need its files
            self._fail(variant, message)

    def _place_reported(self, variant: Variant, rank: int, message: Mapping[str, Any]) -> None:
        variant.unplaced.discard(rank)
        if message["did"] == FAILED:
            self._place_failed(variant, message)
        elif message["did"] == PLACED:
            variant.device[rank] = message["bytes"]
            variant.streams = message.get("streams", False)
            variant.no_memory = variant.no_memory and len(variant.device) < len(self._ranks)
        else:
            variant.no_memory = True

    def _place_failed(self, variant: Variant, message: Mapping[str, Any]) -> None:
        if self.readiness(variant.uid) == READY:
            self._lose(variant, message)
        elif variant.uid not in self._lost:
            self._fail(variant, message)

    def _lose(self, variant: Variant, message: Mapping[str, Any]) -> None:
        """Record that its copy failed under way. It keeps its slot: a rank must have it while steps come."""
        variant.error, variant.fault = message["error"], message.get("fault", "")
        variant.device.clear()
        self._failing.add(variant.uid)
        self._lost.add(variant.uid)

    def _fail(self, variant: Variant, message: Mapping[str, Any]) -> None:
        variant.error, variant.fault = message["error"], message.get("fault", "")
        self._failing.add(variant.uid)
        if variant.slot is not None:
            self._clear(variant)

    # --- slots ---------------------------------------------------------------------------------

    def _slot_with_room(self, variant: Variant, busy: frozenset[int]) -> int | None:
        """A free or freed slot for the variant, with room in every rank's memory; None while there is
        none.
        """
        lacking = self._lacking(variant)
        free = len(self._in_slot) < self.slots
        leaving = victims(self._idle(busy), lacking, 0 if free else 1)
        if leaving is None:
            variant.no_memory = bool(lacking)
            return None
        in_host = self._in_host(variant.uid)
        slot = None if free else self._variants[leaving[0]].slot
        for uid in leaving:
            if self._variants[uid].slot == slot and in_host:
                self._leave(self._variants[uid])  # the next variant of the slot replaces it
            else:
                self._clear(self._variants[uid])
        self._mark(busy)
        return slot_for(self._slots) if slot is None else slot

    def _make_room(self, variant: Variant, busy: frozenset[int]) -> bool:
        """Make room for a variant that has a slot, on a rank without room; False while no variant may leave
        for it.
        """
        leaving = victims(self._idle(busy | {variant.uid}), self._lacking(variant), self._unknown(variant))
        for uid in leaving or ():
            self._clear(self._variants[uid])
        return leaving is not None

    def _unknown(self, variant: Variant) -> int:
        """1 if the lacking bytes are unknown: then one variant leaves at a time."""
        return int(not self._capacity or self._ranks != variant.needs.keys())

    def _lacking(self, variant: Variant) -> dict[int, int]:
        """Bytes that it lacks on ranks, given all others in slots."""
        others = [v for v in self._variants.values() if v.slot is not None and v is not variant]
        lacking = {
            rank: size + sum(v.needs.get(rank, 0) for v in others) - self._capacity[rank]
            for rank, size in variant.needs.items()
            if rank in self._capacity
        }
        return {rank: size for rank, size in lacking.items() if size > 0}

    def _idle(self, busy: frozenset[int]) -> list[Idle]:
        """The variants in slots that may leave, the least recently used first."""
        slots = sorted(self._in_slot, key=lambda slot: int(self._slots["used"][slot]))
        uids = [self._in_slot[slot] for slot in slots if self._in_slot[slot] not in busy]
        return [Idle(uid, self._variants[uid].needs) for uid in uids]

    def _mark(self, busy: frozenset[int]) -> None:
        self._slots["busy"] = [self._in_slot.get(slot) in busy for slot in range(self.slots)]

    def _place(self, variant: Variant, slot: int) -> bool:
        self._use(slot)
        variant.error, variant.ahead = "", False
        self.forgive(variant.uid)
        variant.device.clear()
        variant.unplaced = set(self._ranks)
        order = {"do": PLACE, "uid": variant.uid, "path": variant.path, "slot": slot}
        variant.placing = self._order(order)
        return True

    def _clear(self, variant: Variant) -> None:
        """Empty its slot: other ranks may hold it there although one has failed."""
        self._order({"do": CLEAR, "slot": variant.slot})
        self._leave(variant)

    def _leave(self, variant: Variant) -> None:
        if variant.slot is not None:
            del self._in_slot[variant.slot]
            self._slots["variant"][variant.slot] = EMPTY
        self._lost.discard(variant.uid)
        variant.slot, variant.no_memory = None, False
        variant.device.clear()
        for kept in self._staying.values():
            kept.pop(variant.uid, None)

    def _order(self, message: dict[str, Any]) -> int:
        self._orders += 1
        self.outbox.append({**message, "order": self._orders})
        return self._orders

    # --- for people ----------------------------------------------------------------------------

    def snapshot(self) -> list[dict[str, Any]]:
        """Every known variant: tier, slot, bytes by rank, and why it is not ready."""
        return [self._described(v) for v in self._variants.values()]

    def _described(self, variant: Variant) -> dict[str, Any]:
        ready = self.readiness(variant.uid) == READY
        tier = "device" if ready else "host" if self._in_host(variant.uid) else "disk"
        return {
            "uid": variant.uid,
            "tier": tier,
            "slot": variant.slot,
            "host_bytes": {r: held[variant.uid] for r, held in self._host.items() if variant.uid in held},
            "staying_bytes": {
                r: kept[variant.uid] for r, kept in self._staying.items() if variant.uid in kept
            },
            "device_bytes": dict(variant.device),
            "reason": self._reason(variant, ready),
            "error": variant.error,
            "fault": variant.fault,
        }

    def _reason(self, variant: Variant, ready: bool) -> str:
        if variant.error:
            return variant.error
        if ready:
            return ""
        if variant.no_memory:
            return "waits for memory, which the variants in other slots hold"
        if variant.slot is None:
            return "not in a slot; the next request loads it into a slot"
        lacking = sorted(self._ranks - set(variant.device))
        return f"loading into slot {variant.slot} on rank {', '.join(map(str, lacking))}"

    def _in_host(self, uid: int) -> bool:
        return len(self._host) == len(self._ranks) and all(uid in held for held in self._host.values())
