"""Places for engines in memory that is in use now but will be free soon. Pure.

Measurements of profiles end, or can be preempted. Stopped engines free their memory.
"""

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
from placement.types import CPU, Device, DeviceKey, HolderMemory, Inventory, Placement, key_of

T = TypeVar("T")
Decide = Callable[[Inventory], Placement]


@dataclass(frozen=True)
class FreeMemory:
    """The devices with their free memory: `now`, and `once_measured`, without reservations of measurements.

    `measured` has the profile's key for each device with a measurement.
    """

    now: Inventory
    once_measured: Inventory
    measured: Mapping[DeviceKey, str]

    def beside(self) -> FreeMemory:
        """Free memory if no measurement ever ended: only places next to the measurements count."""
        return FreeMemory(self.now, self.now, {})

    def less(self, placed: Placement) -> FreeMemory:
        """The free memory after this placement is made as well."""
        now, once_measured = (less(free, [placed]) for free in (self.now, self.once_measured))
        return replace(self, now=now, once_measured=once_measured)


@dataclass(frozen=True)
class Place:
    """A placement, and its `victims`: the profiles whose measurement must end first. Without victims it is
    possible now."""

    placement: Placement
    victims: tuple[str, ...] = ()


def free_memory(inventory: Inventory, ledgers: Ledgers, headroom: float, exclude: str = "") -> FreeMemory:
    """The free memory of the devices. Reservations of `exclude`, which is placed again, do not count."""
    free, measured = (
        partial(reservations.available, inventory, ledgers, headroom, exclude),
        reservations.being_measured(ledgers),
    )
    now = free()
    return FreeMemory(now, free(measured=False) if measured else now, measured)


def place(decide: Decide, seen: FreeMemory) -> Place:
    """The placement that is possible now, or a better one that is possible when all measurements have ended.

    A placement on GPUs is better than one on CPUs. Among the same kind, the one with limits relaxed less is
    better, then the one whose engine was not made smaller by lack of memory. Errors: NoFeasiblePlan, when
    nothing fits even then.
    """
    if not seen.measured:
        return Place(decide(seen.now))
    now = _tried(lambda: decide(seen.now))
    later = decide(seen.once_measured) if now is None else _tried(lambda: decide(seen.once_measured)) or now
    if now is not None and preference(now) <= preference(later):
        return Place(now)
    return Place(later, _victims(later, seen))


def place_or_resample(decide: Decide, seen: FreeMemory, reclaimed: FreeMemory) -> Place | None:
    """As `place`; None when it is worth waiting for newer samples of the devices.

    That is the case when nothing fits now, or when `reclaimed` memory allows a better placement, or an
    equally good one with fewer victims.
    """
    now = _tried(lambda: place(decide, seen))
    if now is None or reclaimed == seen:
        return now
    later = _tried(lambda: place(decide, reclaimed))
    return None if later is not None and _worth(later) < _worth(now) else now


def waits_for_measuring(chosen: Place, established: bool) -> bool:
    """Whether an engine waits for the end of its victims' measurements.

    The first engine of a deployment waits. An engine of a deployment that served before takes their memory,
    and the profiles are measured later.
    """
    return bool(chosen.victims) and not established


def reclaimed(
    inventory: Inventory, ledgers: Ledgers, exclude: str = "", unnamed_on: Collection[str] = ()
) -> Inventory:
    """The devices after holders without a reservation have freed their memory: stopped engines, and
    measurements that ended. On the device models `unnamed_on`, memory of processes without a known holder is
    freed, too."""
    promises, at_all = reservations.promised(ledgers, exclude), _holders_of_nodes(ledgers, exclude)

    def goes(device: Device, use: HolderMemory) -> bool:
        if use.holder is None:
            return _model(device) in unnamed_on
        if device.kind == CPU:  # engines on GPUs use memory of their host, too
            return use.holder not in ("", *at_all.get(device.node, ()))
        return use.holder not in ("", *promises.get(key_of(device), ()))

    return replace(inventory, devices=tuple(_without(d, partial(goes, d)) for d in inventory.devices))


def measured_lately(state: State, now_s: float, within_s: float) -> frozenset[str]:
    """Device models with a measurement that ended so recently that samples may still show its memory as
    used."""
    return frozenset(
        profile.record.device
        for profile in state.profiles.values()
        if profile.record.settled and now_s - profile.record.updated_at_s < within_s
    )


def models(inventory: Inventory) -> frozenset[str]:
    """The models of all devices, as named in profiles."""
    return frozenset(map(_model, inventory.devices))


def _model(device: Device) -> str:
    return device.model or device.kind


def _holders_of_nodes(ledgers: Ledgers, exclude: str) -> dict[str, set[str]]:
    holders_of: dict[str, set[str]] = {}
    for (node, _, _), holders in reservations.promised(ledgers, exclude).items():
        holders_of.setdefault(node, set()).update(holders)
    return holders_of


def _without(device: Device, goes: Callable[[HolderMemory], bool]) -> Device:
    gone_bytes = sum(use.memory_bytes for use in device.uses if goes(use))
    free_bytes = min(device.total_bytes, device.free_bytes + gone_bytes)
    return replace(device, free_bytes=free_bytes, uses=tuple(use for use in device.uses if not goes(use)))


def _tried(decide: Callable[[], T]) -> T | None:
    try:
        return decide()
    except errors.NoFeasiblePlan:
        return None


def _worth(chosen: Place) -> tuple[bool, float, bool, int]:
    """A sort key; lower is better."""
    return *preference(chosen.placement), len(chosen.victims)


def _victims(placed: Placement, seen: FreeMemory) -> tuple[str, ...]:
    """The profiles measured on devices whose memory is not free now for this placement."""
    free = {key_of(device): device.free_bytes for device in seen.now.devices}
    short = {at for at, count in taken_by([placed]).items() if count > free.get(at, 0)}
    return tuple(sorted({key for at, key in seen.measured.items() if at in short}))
