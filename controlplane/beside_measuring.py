"""A place for an engine while profiles are measured: beside them, once they have ended, or instead. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from controlplane import errors, ledger
from controlplane.ledger import Ledgers
from placement.rebalancing import less, taken_by
from placement.types import CPU, DeviceKey, Inventory, Placement, key_of


@dataclass(frozen=True)
class Sight:
    """The devices with what is free `now`, and `once_measured`, when no measuring has a promise any more; the
    profile that is `measured` on a device."""

    now: Inventory
    once_measured: Inventory
    measured: Mapping[DeviceKey, str]

    def less(self, placed: Placement) -> Sight:
        """What is free beside this placement too."""
        now, once_measured = (less(free, [placed]) for free in (self.now, self.once_measured))
        return replace(self, now=now, once_measured=once_measured)


@dataclass(frozen=True)
class Found:
    """A placement, and the profiles whose measuring is in its way; without any it is possible now."""

    placement: Placement
    in_the_way: tuple[str, ...] = ()


def sight(inventory: Inventory, ledgers: Ledgers, headroom: float, besides: str = "") -> Sight:
    """What `besides` was promised does not count: it is to be placed anew."""
    free = partial(ledger.available, inventory, ledgers, headroom, besides)
    return Sight(free(measured=True), free(measured=False), ledger.being_measured(ledgers))


def find(decide: Callable[[Inventory], Placement], seen: Sight) -> Found:
    """The placement that is possible now, unless a better one will be: on GPUs rather than CPUs, with less
    of the limits relaxed, or any at all.

    Errors: NoFeasiblePlan, when there will be none either.
    """
    if not seen.measured:
        return Found(decide(seen.now))
    now = _tried(decide, seen.now)
    later = decide(seen.once_measured) if now is None else _tried(decide, seen.once_measured) or now
    if now is not None and _rank(now) <= _rank(later):
        return Found(now)
    return Found(later, _in_the_way(later, seen))


def _tried(decide: Callable[[Inventory], Placement], inventory: Inventory) -> Placement | None:
    try:
        return decide(inventory)
    except errors.NoFeasiblePlan:
        return None


def _rank(placed: Placement) -> tuple[bool, float]:
    """Least is best, as `deploying` chooses."""
    factor = max((one.factor for one in placed.choice.relaxed), default=1.0)
    return placed.ranks[0].device_kind == CPU, factor


def _in_the_way(placed: Placement, seen: Sight) -> tuple[str, ...]:
    """Of the devices whose memory it does not find free now."""
    free = {key_of(device): device.free_bytes for device in seen.now.devices}
    short = {at for at, count in taken_by([placed]).items() if count > free.get(at, 0)}
    return tuple(sorted({key for at, key in seen.measured.items() if at in short}))
