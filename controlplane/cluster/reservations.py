"""Reservations of device memory, and the memory that is left: pure functions.

A reservation is committed together with the placement or the measurement that it is for. The commit names the
versions of the node ledgers as they were read, so one of two decisions on the same state of a node fails. The
holder of a reservation is a worker group, `measuring:KEY` for the profile of that key, or `compressing:NAME`
for the model of that name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from controlplane.state.records import Deployment, Model, ModelProfile, NodeLedger, Phase, Reservation
from controlplane.state.repository import Change, Delete, Put, State, Versioned
from controlplane.state.worker_groups import GroupPhase, base_of
from placement.solver.cluster import LOAD_WINDOW
from placement.types import Device, DeviceKey, Inventory, Placement, key_of

Ledgers = Mapping[str, Versioned[NodeLedger]]

MEASURING, COMPRESSING = "measuring:", "compressing:"  # no group has such a name: models' names have no colon


@dataclass(frozen=True)
class MemoryUsage:
    """The use of a device's memory. The parts, including what is `free` for the next placement, sum to its
    total, unless more is in use than exists.

    `ours`: for each holder of a reservation here, its reservation, or its processes' use if that is larger.
    `others`: the use of all other processes. `headroom`: left free.
    """

    ours: Mapping[str, int]
    others: int
    headroom: int
    free: int


def measuring(key: str) -> str:
    """The holder of the reservations to measure the profile of this key."""
    return MEASURING + key


def compressing(name: str) -> str:
    """The holder of the reservations to make the delta of this model."""
    return COMPRESSING + name


def is_measuring(holder: str) -> bool:
    return holder.startswith(MEASURING)


def reserve(
    state: State,
    holder: str,
    uid: int,
    placement: Placement,
    now_s: float,
    preempting: Collection[str] = (),
) -> list[Change]:
    """Reserve memory for each rank of a placement.

    This replaces all earlier reservations of `holder` and of the holders that it is `preempting`.
    """
    wanted: dict[str, list[Reservation]] = defaultdict(list)
    for r in placement.ranks:
        wanted[r.node].append(
            Reservation(holder, uid, r.rank, r.device_kind, r.device_index, r.memory_bytes, now_s)
        )
    return _replaced(state.ledgers, (holder, *preempting), wanted)


def reserve_to_measure(
    state: State, key: str, uid: int, devices: Sequence[DeviceKey], memory_bytes: int, now_s: float
) -> list[Change]:
    """Reserve `memory_bytes` of each device to measure a profile; replaces its earlier reservations."""
    return _reserve(state, measuring(key), uid, devices, memory_bytes, now_s)


def reserve_to_compress(
    state: State, name: str, uid: int, device: DeviceKey, memory_bytes: int, now_s: float
) -> list[Change]:
    """Reserve `memory_bytes` of a device to make the delta of a model; replaces its earlier reservations."""
    return _reserve(state, compressing(name), uid, [device], memory_bytes, now_s)


def _reserve(
    state: State, holder: str, uid: int, devices: Sequence[DeviceKey], memory_bytes: int, now_s: float
) -> list[Change]:
    wanted: dict[str, list[Reservation]] = defaultdict(list)
    for rank, (node, kind, index) in enumerate(devices):
        wanted[node].append(Reservation(holder, uid, rank, kind, index, memory_bytes, now_s))
    return _replaced(state.ledgers, (holder,), wanted)


def release(state: State, *holders: str) -> list[Change]:
    """Release all reservations of these holders."""
    return _replaced(state.ledgers, holders, {})


def being_measured(ledgers: Ledgers) -> dict[DeviceKey, str]:
    """The key of the profile that is measured on each device."""
    return {
        DeviceKey(ledger.record.node, r.kind, r.index): r.holder.removeprefix(MEASURING)
        for ledger in ledgers.values()
        for r in ledger.record.reservations
        if is_measuring(r.holder)
    }


def orphans(state: State) -> list[str]:
    """Holders whose group, deployment, measurement or compression no longer exists, or is an earlier one
    of its name."""
    held = {(r.holder, r.uid) for ledger in state.ledgers.values() for r in ledger.record.reservations}
    gone = {holder for holder, uid in held if uid != _uid_of(state, holder)}
    return sorted(holder for holder in gone if not _is_unreadable(state, holder))


def without_orphans(state: State, holder: str) -> list[Change]:
    """Release the reservations of earlier groups or measurements of this name."""
    uid = _uid_of(state, holder)
    changes: list[Change] = []
    for node in _nodes_of(state.ledgers, (holder,)):
        mine = [r for r in state.ledgers[node].record.reservations if r.holder == holder]
        kept = [r for r in mine if r.uid == uid]
        if kept != mine:
            changes += _changed(state.ledgers, node, (holder,), kept)
    return changes


def _uid_of(state: State, holder: str) -> int | None:
    """The uid that distinguishes the present holder from earlier holders of its name; None when there is
    none."""
    if is_measuring(holder):
        profile = state.profiles.get(holder.removeprefix(MEASURING))
        return profile.record.rounds if profile and profile.record.phase is Phase.PROFILING else None
    if holder.startswith(COMPRESSING):
        return _uid_compressing(state, holder.removeprefix(COMPRESSING))
    deployment = state.deployments.get(base_of(holder))
    return deployment.record.uid if deployment and holder in deployment.record.group_ids() else None


def _is_unreadable(state: State, holder: str) -> bool:
    """Tell whether the holder's record exists but cannot be read."""
    if is_measuring(holder):
        return state.unreadable(ModelProfile, holder.removeprefix(MEASURING))
    if holder.startswith(COMPRESSING):
        return state.unreadable(Model, holder.removeprefix(COMPRESSING))
    return state.unreadable(Deployment, base_of(holder))


def _uid_compressing(state: State, name: str) -> int | None:
    model = state.models.get(name)
    return model.record.uid if model and model.record.phase is Phase.COMPRESSING else None


def available(
    inventory: Inventory, ledgers: Ledgers, headroom: float, exclude: str = "", measured: bool = True
) -> Inventory:
    """The inventory with the resources that are free for the next placement: memory, and the time of each
    device.

    `headroom`: the share of each device to leave free. `exclude`: a holder whose reservations do not count,
    because it is to be placed again. `measured=False`: the memory that will be free once no measurements run.
    """
    promises = promised(ledgers, exclude)

    def free_bytes(device: Device) -> int:
        usage = memory_usage(device, promises.get(key_of(device), {}), headroom)
        if measured:
            return usage.free
        kept = sum(count for holder, count in usage.ours.items() if not is_measuring(holder))
        return max(0, device.total_bytes - usage.headroom - kept - usage.others)

    return replace(
        inventory,
        devices=tuple(
            replace(d, free_bytes=free_bytes(d), load=lasting_load(d, promises.get(key_of(d), {})))
            for d in inventory.devices
        ),
    )


def lasting_load(device: Device, promises: Mapping[str, int]) -> float:
    """The expected load of a device, as a share of its time, from the recent past. It counts other users'
    work and engines with `promises` there. It leaves out measurements, compressions and our own processes,
    which end or rest, and engines without a promise, which are gone."""
    passing = sum(
        share
        for holder, share in device.work
        if holder not in promises or is_measuring(holder) or holder.startswith(COMPRESSING)
    )
    return min(1.0, max(0.0, device.load - passing))


def busy_with_others(inventory: Inventory, held: Collection[DeviceKey], profile: str) -> float | None:
    """The largest share of time that other work takes of the devices that measure a profile. None: no such
    device is reported."""
    shares = [
        device.load - sum(share for holder, share in device.work if holder == measuring(profile))
        for device in inventory.devices
        if key_of(device) in held
    ]
    return min(1.0, max(0.0, *shares)) if shares else None


def without_starts(inventory: Inventory, state: State, now_s: float) -> Inventory:
    """The inventory without the load of engines' starts during the samples: reading weights and compiling
    is over once engines serve."""
    starting = {
        group_id
        for d in state.deployments.values()
        for group_id, group in zip(d.record.group_ids(), d.record.groups, strict=True)
        if group.phase is GroupPhase.STARTING
        or (group.phase is GroupPhase.SERVING and now_s - group.since_s < LOAD_WINDOW)
    }

    def rested(device: Device) -> Device:
        share = sum(share for holder, share in device.work if holder in starting)
        work = tuple((holder, share) for holder, share in device.work if holder not in starting)
        return replace(device, load=max(0.0, device.load - share), work=work)

    return replace(inventory, devices=tuple(map(rested, inventory.devices))) if starting else inventory


def promised(ledgers: Ledgers, exclude: str = "") -> dict[DeviceKey, dict[str, int]]:
    """Reserved bytes by device and holder."""
    promises: dict[DeviceKey, dict[str, int]] = {}
    for ledger in ledgers.values():
        for r in ledger.record.reservations:
            if r.holder != exclude:
                holders = promises.setdefault(DeviceKey(ledger.record.node, r.kind, r.index), {})
                holders[r.holder] = holders.get(r.holder, 0) + r.memory_bytes
    return promises


def stale_holders(inventory: Inventory, ledgers: Ledgers, exclude: str = "") -> frozenset[str]:
    """Holders with memory of a device but no reservation there: engines that stopped or are stopping."""
    promises = promised(ledgers, exclude)
    return frozenset(
        use.holder
        for d in inventory.devices
        for use in d.uses
        if use.holder and use.holder not in promises.get(key_of(d), {})
    )


def memory_usage(device: Device, promises: Mapping[str, int], headroom: float) -> MemoryUsage:
    """The use of one device's memory, given the promised bytes by holder.

    A process that the node cannot name (it is in another container) is assigned to a holder whose engine is
    not visible, up to that holder's promise.
    """
    taken: dict[str | None, int] = defaultdict(int)
    for use in device.uses:
        taken[use.holder] += use.memory_bytes
    ours = {holder: max(count, taken[holder]) for holder, count in promises.items()}
    unseen = sum(count for holder, count in promises.items() if not taken[holder])
    known = sum(taken[holder] for holder in promises) + min(taken[None], unseen)
    others = max(0, device.total_bytes - device.free_bytes - known)
    kept = int(device.total_bytes * headroom)
    return MemoryUsage(ours, others, kept, max(0, device.total_bytes - kept - sum(ours.values()) - others))


def _replaced(
    ledgers: Ledgers, holders: Collection[str], wanted: Mapping[str, Iterable[Reservation]]
) -> list[Change]:
    """The changes that replace all reservations of `holders` by `wanted`, by node."""
    return [
        change
        for node in sorted({*wanted, *_nodes_of(ledgers, holders)})
        for change in _changed(ledgers, node, holders, wanted.get(node, ()))
    ]


def _nodes_of(ledgers: Ledgers, holders: Collection[str]) -> list[str]:
    return sorted(
        node
        for node, ledger in ledgers.items()
        if any(r.holder in holders for r in ledger.record.reservations)
    )


def _changed(
    ledgers: Ledgers, node: str, holders: Collection[str], wanted: Iterable[Reservation]
) -> list[Change]:
    """The change that replaces the reservations of `holders` in a node's ledger by `wanted`."""
    ledger = ledgers.get(node)
    others = [r for r in ledger.record.reservations if r.holder not in holders] if ledger else []
    reservations = (*others, *wanted)
    version = ledger.version if ledger else 0
    if reservations:
        return [Put(NodeLedger(node, reservations), version)]
    return [Delete(NodeLedger, node, version)] if ledger else []
