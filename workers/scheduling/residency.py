"""Which variant is in which slot on which rank, as the scheduler knows it. Pure: no I/O, no clock.

The scheduler decides slots for all ranks alike; ranks report what they have done. A variant may run
once every rank has it in its slot. A slot is taken from the variant that was used longest ago among
those no batch in flight uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from workers.scheduling.policy import Readiness

PLACE, PREPARE, CLEAR = "place", "prepare", "clear"
PLACED, PREPARED, NO_ROOM, FAILED = "placed", "prepared", "no_room", "failed"


@dataclass
class Variant:
    """`device` maps a rank to the bytes it holds in the slot; `slot` is the one it was given."""

    uid: int
    path: str
    slot: int | None = None
    device: dict[int, int] = field(default_factory=dict)
    error: str = ""
    crowded: bool = False  # some rank had no room for it in its slot
    used: int = 0


class Residency:
    """Slots 0 .. `slots` - 1 on `ranks` ranks. Messages for all ranks collect in `outbox`."""

    def __init__(self, slots: int, ranks: int) -> None:
        self.slots = slots
        self._ranks = ranks
        self._variants: dict[int, Variant] = {}
        self._in_slot: dict[int, int] = {}
        self._host: dict[int, dict[int, int]] = {}  # by rank: bytes by uid
        self._clock = 0
        self.outbox: list[dict[str, Any]] = []

    # --- what the scheduler asks ---------------------------------------------------------------

    def readiness(self, uid: int) -> Readiness:
        found = self._variants.get(uid)
        if found is None or found.slot is None:
            return Readiness.ABSENT
        return Readiness.READY if len(found.device) == self._ranks else Readiness.LOADING

    def error(self, uid: int) -> str:
        """Why a variant cannot be loaded; empty when nothing speaks against it."""
        found = self._variants.get(uid)
        return found.error if found else ""

    def touch(self, uids: Iterable[int]) -> None:
        """These are used now."""
        self._clock += 1
        for uid in uids:
            if (found := self._variants.get(uid)) is not None:
                found.used = self._clock

    def load(self, uid: int, path: str, busy: frozenset[int]) -> bool:
        """Give the variant a slot and tell the ranks; False while all slots are in use (`busy`)."""
        found = self._variants.setdefault(uid, Variant(uid, path))
        if found.slot is not None and not found.crowded:
            return True
        if found.crowded and not self._make_room(busy - {uid}, keep=uid):
            return False
        slot = found.slot if found.slot is not None else self._free_slot(busy)
        if slot is None:
            return False
        self._clock += 1
        found.slot, found.used, found.crowded, found.error = slot, self._clock, False, ""
        found.device.clear()
        self._in_slot[slot] = uid
        self.outbox.append({"do": PLACE, "uid": uid, "path": found.path, "slot": slot})
        return True

    def prepare(self, uid: int, path: str) -> None:
        """Have the ranks read and check a variant. Starts anew after an error."""
        found = self._variants.setdefault(uid, Variant(uid, path))
        found.error, found.path = "", path
        self.outbox.append({"do": PREPARE, "uid": uid, "path": path})

    def prepared(self, uid: int) -> bool:
        """True once every rank has it in host memory."""
        return len(self._host) == self._ranks and all(uid in held for held in self._host.values())

    def forgive(self, uid: int) -> None:
        """Forget an error: the next request tries again."""
        if (found := self._variants.get(uid)) is not None:
            found.error = ""

    # --- what the ranks report -----------------------------------------------------------------

    def reported(self, rank: int, message: Mapping[str, Any]) -> None:
        """What became of a PREPARE or PLACE on a rank; `host` tells all it holds in host memory."""
        self._host[rank] = {int(uid): size for uid, size in message["host"].items()}
        found = self._variants.get(message["uid"])
        if found is None:
            return
        what = message["did"]
        if what == FAILED:
            self._leave(found)
            found.error = message["error"]
        elif what == PREPARED or message["slot"] != found.slot:
            return  # of a slot it has left meanwhile
        elif what == PLACED:
            found.device[rank] = message["bytes"]
        elif what == NO_ROOM:
            found.crowded = True
            found.device.pop(rank, None)

    # --- slots ---------------------------------------------------------------------------------

    def _free_slot(self, busy: frozenset[int]) -> int | None:
        free = next((s for s in range(self.slots) if s not in self._in_slot), None)
        if free is not None:
            return free
        leaving = self._least_used(busy)
        if leaving is None:
            return None
        slot = leaving.slot
        self._leave(leaving)
        return slot

    def _make_room(self, busy: frozenset[int], keep: int) -> bool:
        """Clear the slot used longest ago, other than `keep`'s; False when none may be cleared."""
        leaving = self._least_used(busy | {keep})
        if leaving is None:
            return False
        self.outbox.append({"do": CLEAR, "slot": leaving.slot})
        self._leave(leaving)
        return True

    def _least_used(self, busy: frozenset[int]) -> Variant | None:
        idle = [self._variants[uid] for uid in self._in_slot.values() if uid not in busy]
        return min(idle, key=lambda v: v.used, default=None)

    def _leave(self, variant: Variant) -> None:
        if variant.slot is not None:
            self._in_slot.pop(variant.slot, None)
        variant.slot, variant.crowded = None, False
        variant.device.clear()

    # --- for people ----------------------------------------------------------------------------

    def snapshot(self) -> list[dict[str, Any]]:
        """Every known variant: tier, slot, bytes by rank, and why it is not ready."""
        return [self._described(v) for v in self._variants.values()]

    def _described(self, variant: Variant) -> dict[str, Any]:
        ready = self.readiness(variant.uid) is Readiness.READY
        tier = "device" if ready else "host" if self.prepared(variant.uid) else "disk"
        return {
            "uid": variant.uid,
            "tier": tier,
            "slot": variant.slot,
            "host_bytes": {r: held[variant.uid] for r, held in self._host.items() if variant.uid in held},
            "device_bytes": dict(variant.device),
            "reason": self._reason(variant, ready),
        }

    def _reason(self, variant: Variant, ready: bool) -> str:
        if variant.error:
            return variant.error
        if ready:
            return ""
        if variant.crowded:
            return "waiting for room: the variants in other slots take the memory"
        if variant.slot is None:
            return "not in a slot; it gets one when a request asks for it"
        lacking = sorted(set(range(self._ranks)) - set(variant.device))
        return f"loading into slot {variant.slot} on rank {', '.join(map(str, lacking))}"
