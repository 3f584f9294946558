"""A place for an engine while profiles are measured: beside them, once they have ended, or instead; and while
memory is given back. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from controlplane import errors
from controlplane.cluster import reservations
from controlplane.cluster.reservations import Ledgers
from controlplane.planning.placement_decision import preference
from controlplane.state.repository import State
from placement.rebalancing import less, taken_by
from placement.types import CPU, Device, DeviceKey, Inventory, Placement, Use, key_of

T = TypeVar("T")
Decide = Callable[[Inventory], Placement]


@dataclass(frozen=True)
class Sight:
    """The devices with what is free `now`, and `once_measured`, when no measuring has a promise any more; the
    profile that is `measured` on a device."""

    now: Inventory
    once_measured: Inventory
    measured: Mapping[DeviceKey, str]

    def beside(self) -> Sight:
        """As if no measuring ended: a place is only sought beside them."""
        return Sight(self.now, self.now, {})

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
    free, measured = (
        partial(reservations.available, inventory, ledgers, headroom, besides),
        reservations.being_measured(ledgers),
    )
    now = free()
    return Sight(now, free(measured=False) if measured else now, measured)


def find(decide: Decide, seen: Sight) -> Found:
    """The placement that is possible now, unless a better one will be: on GPUs rather than CPUs, with less
    of the limits relaxed, or any at all.

    Errors: NoFeasiblePlan, when there will be none either.
    """
    if not seen.measured:
        return Found(decide(seen.now))
    now = _tried(lambda: decide(seen.now))
    later = decide(seen.once_measured) if now is None else _tried(lambda: decide(seen.once_measured)) or now
    if now is not None and preference(now) <= preference(later):
        return Found(now)
    return Found(later, _in_the_way(later, seen))


def find_patiently(decide: Decide, seen: Sight, given_back: Sight) -> Found | None:
    """As `find`; None when newer samples should be awaited: it finds nothing, or something better once memory
    is `given_back`. Better is also what is in no measuring's way."""
    found = _tried(lambda: find(decide, seen))
    if found is None or given_back == seen:
        return found
    later = _tried(lambda: find(decide, given_back))
    return None if later is not None and _worth(later) < _worth(found) else found


def given_back(
    inventory: Inventory, ledgers: Ledgers, besides: str = "", unnamed_on: Collection[str] = ()
) -> Inventory:
    """The devices once nobody has memory there any more who is promised none: engines that were stopped,
    measurings that ended. Also without that of processes without a name, on these models of devices."""
    promises, at_all = reservations.promised(ledgers, besides), _holders_of_nodes(ledgers, besides)

    def goes(device: Device, use: Use) -> bool:
        if use.holder is None:
            return _model(device) in unnamed_on
        if device.kind == CPU:  # engines on GPUs take of their host, too
            return use.holder not in ("", *at_all.get(device.node, ()))
        return use.holder not in ("", *promises.get(key_of(device), ()))

    return replace(inventory, devices=tuple(_without(d, partial(goes, d)) for d in inventory.devices))


def measured_lately(state: State, now_s: float, within_s: float) -> frozenset[str]:
    """Models of devices on which a measuring may have ended so lately that its memory is seen taken yet."""
    return frozenset(
        found.record.device
        for found in state.profiles.values()
        if found.record.settled and now_s - found.record.updated_at_s < within_s
    )


def models(inventory: Inventory) -> frozenset[str]:
    """Of all devices, as profiles name them."""
    return frozenset(map(_model, inventory.devices))


def _model(device: Device) -> str:
    return device.model or device.kind


def _holders_of_nodes(ledgers: Ledgers, besides: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for (node, _, _), holders in reservations.promised(ledgers, besides).items():
        found.setdefault(node, set()).update(holders)
    return found


def _without(device: Device, goes: Callable[[Use], bool]) -> Device:
    gone_bytes = sum(use.memory_bytes for use in device.uses if goes(use))
    free_bytes = min(device.total_bytes, device.free_bytes + gone_bytes)
    return replace(device, free_bytes=free_bytes, uses=tuple(use for use in device.uses if not goes(use)))


def _tried(found: Callable[[], T]) -> T | None:
    try:
        return found()
    except errors.NoFeasiblePlan:
        return None


def _worth(found: Found) -> tuple[bool, float, int]:
    """Least is best."""
    return *preference(found.placement), len(found.in_the_way)


def _in_the_way(placed: Placement, seen: Sight) -> tuple[str, ...]:
    """Of the devices whose memory it does not find free now."""
    free = {key_of(device): device.free_bytes for device in seen.now.devices}
    short = {at for at, count in taken_by([placed]).items() if count > free.get(at, 0)}
    return tuple(sorted({key for at, key in seen.measured.items() if at in short}))
