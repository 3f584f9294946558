"""Which variant is in which slot on which rank, as the scheduler knows it. Pure: no I/O, no clock.

The scheduler decides slots for all ranks alike; ranks report what they have done. A variant may run
once every rank has it in its slot, or on its way there so that steps wait on the device for what they read;
such a rank may still report that it has failed. Where there is no free slot, or too little memory, variants
that no batch in flight uses leave their slots: which ones, `eviction` says. On a rank's device a variant has
room if the free bytes are enough together, for the rank moves variants. Every order to the ranks has a
number, which their reports repeat: a report of anything but the newest order about a variant says nothing
about what is there now.
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
    """`device` maps a rank to the bytes it holds in the slot, `needs` to those that it takes there, once that
    is known; `slot` is the one it was given."""

    uid: int
    path: str
    slot: int | None = None
    device: dict[int, int] = field(default_factory=dict)
    needs: dict[int, int] = field(default_factory=dict)
    placing: int = 0  # the newest order to place it
    unplaced: set[int] = field(default_factory=set)  # ranks that have not answered that order
    preparing: int = 0
    unprepared: set[int] = field(default_factory=set)
    reading: set[int] = field(default_factory=set)  # ranks that have not answered that order, either way
    error: str = ""
    fault: str = ""  # what kind of failure the error is (`faults.Fault`)
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
    """Slots 0 .. `slots` - 1 on `ranks` ranks. Messages for all ranks collect in `outbox`."""

    def __init__(self, slots: int, ranks: int) -> None:
        self.slots = slots
        self._ranks = frozenset(range(ranks))
        self._variants: dict[int, Variant] = {}
        self._in_slot: dict[int, int] = {}  # uid by slot, in the order in which they were given
        self._slots = records(SLOT, slots).view(np.ndarray)
        self._slots["variant"] = EMPTY
        slot_for(self._slots)  # compiled, or read from the cache, before the first request
        self._capacity: dict[int, int] = {}  # by rank: bytes for the variants in slots together
        self._host: dict[int, dict[int, int]] = {}  # by rank: bytes by uid
        self._staying: dict[int, dict[int, int]] = {}  # the same, of what is in a slot and not in `_host`
        self._failing: set[int] = set()
        self._departing: set[int] = set()
        self._lost: set[int] = set()  # failed when steps might use them; in their slots until none does
        self._ahead = _ReadAhead()
        self._clock = 0
        self._orders = 0
        self.outbox: list[dict[str, Any]] = []

    # --- what the scheduler asks ---------------------------------------------------------------

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
        """Whether the ranks will say in an instant that it may run: it is on its way to a slot from the host
        memory of all of them, and they do not wait for that copy."""
        variant = self._variants.get(uid)
        return variant is not None and bool(variant.unplaced) and variant.streams and self._in_host(uid)

    def size_bytes(self, uid: int) -> int:
        """What a variant takes on the rank where it takes most; 0 while no rank has it."""
        variant = self._variants.get(uid)
        return max(variant.device.values(), default=0) if variant else 0

    def error(self, uid: int) -> str:
        """Why a variant cannot be loaded; empty when nothing speaks against trying."""
        return self._variants[uid].error if uid in self._failing else ""

    def fault(self, uid: int) -> str:
        """What kind of failure the error is; empty without one."""
        return self._variants[uid].fault if uid in self._failing else ""

    @property
    def failing(self) -> bool:
        """Whether there is a variant that cannot be loaded."""
        return bool(self._failing)

    def take_failures(self) -> dict[int, str]:
        """Errors by variant. They are forgiven with that: the next request tries again."""
        errors = {uid: self._variants[uid].error for uid in self._failing}
        self._failing.clear()
        return errors

    def touch(self, uids: Collection[int]) -> None:
        """These are used now. Of two, the one that has its slot longer counts as used earlier."""
        for slot, uid in self._in_slot.items():
            if uid in uids:
                self._use(slot)

    def _use(self, slot: int) -> None:
        self._clock += 1
        self._slots["used"][slot] = self._clock

    def load(self, uid: int, path: str, busy: frozenset[int]) -> bool:
        """Have a variant in a slot, with room in every rank's memory; others leave for it if need be, which
        are not `busy`. False while there are not enough of these."""
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
        """Have the ranks read and check a variant that is asked for. Starts anew after an error."""
        variant = self._variant(uid, path)
        self._departing.discard(uid)
        self.forgive(uid)
        variant.error = ""
        variant.preparing = self._order({"do": PREPARE, "uid": uid, "path": path})
        variant.unprepared, variant.reading = set(self._ranks), set(self._ranks)

    def read_ahead(self, uid: int, path: str) -> None:
        """Have a variant in host memory that waits for others to leave their slots: so its slot is not kept
        waiting for a disk. One is read ahead at a time, for more could drive each other from host memory, and
        once for each slot that it gets. What comes of it is told when it is placed."""
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
        """No new request will name it: it goes with `let_go`, once nobody wants it any more."""
        if uid in self._variants:
            self._departing.add(uid)

    @property
    def departing(self) -> bool:
        return bool(self._departing)

    def let_go(self, wanted: frozenset[int]) -> None:
        """Those to be forgotten, but for the `wanted`, leave their slots and every rank's memory. Those that
        some rank still reads go later: it would keep them, and who asked for them would not be answered."""
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
        """Whether a variant has failed that steps might use already."""
        return bool(self._lost)

    def give_up(self, in_use: Collection[int]) -> None:
        """Those that were lost leave their slots, but for those that steps in flight use."""
        for uid in self._lost - set(in_use):
            self._clear(self._variants[uid])

    def prepared(self, uid: int) -> bool:
        """True once every rank has read it as `prepare` asked, or it may run anyway."""
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
        """What a rank has for the variants in slots together."""
        self._capacity[rank] = capacity_bytes

    def reported(self, rank: int, message: Mapping[str, Any]) -> None:
        """What became of a PREPARE or PLACE on a rank, and how many bytes the variant takes on its device;
        `host` tells all it holds in host memory, `staying` what is there of variants in slots alone."""
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
        elif self.readiness(variant.uid) != READY:  # what runs does not need its files
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
        """Its copy has failed under way. Its slot stays its own: a rank must have it while steps come."""
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
        """A slot for it, free or made so, and room in every rank's memory; None while there is none."""
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
                self._leave(self._variants[uid])  # what takes the slot at once has the memory, too
            else:
                self._clear(self._variants[uid])
        self._mark(busy)
        return slot_for(self._slots) if slot is None else slot

    def _make_room(self, variant: Variant, busy: frozenset[int]) -> bool:
        """For one that has a slot, and has met a rank without room; False while none may leave for it."""
        leaving = victims(self._idle(busy | {variant.uid}), self._lacking(variant), self._unknown(variant))
        for uid in leaving or ():
            self._clear(self._variants[uid])
        return leaving is not None

    def _unknown(self, variant: Variant) -> int:
        """1 where it is not known how much is lacking: then one leaves at a time."""
        return int(not self._capacity or self._ranks != variant.needs.keys())

    def _lacking(self, variant: Variant) -> dict[int, int]:
        """Bytes that it lacks on ranks, beside all others in slots."""
        others = [v for v in self._variants.values() if v.slot is not None and v is not variant]
        lacking = {
            rank: size + sum(v.needs.get(rank, 0) for v in others) - self._capacity[rank]
            for rank, size in variant.needs.items()
            if rank in self._capacity
        }
        return {rank: size for rank, size in lacking.items() if size > 0}

    def _idle(self, busy: frozenset[int]) -> list[Idle]:
        """Those in slots that may leave, the one first that was used longest ago."""
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
        """Its slot is emptied: other ranks may hold it there although one has failed."""
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
            return "waiting for room: the variants in other slots take the memory"
        if variant.slot is None:
            return "not in a slot; it gets one when a request asks for it"
        lacking = sorted(self._ranks - set(variant.device))
        return f"loading into slot {variant.slot} on rank {', '.join(map(str, lacking))}"

    def _in_host(self, uid: int) -> bool:
        return len(self._host) == len(self._ranks) and all(uid in held for held in self._host.values())
