"""Which memory of which device is reserved for whom, and what is left: pure functions.

A reservation is committed together with the placement or the measuring that it is for. The commit names
the versions of the node ledgers as they were read: of two decisions on the same state of a node one fails.
The holder of a reservation is a worker group, `measuring:KEY` for the profile of that key, or
`compressing:NAME` for the model of that name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from controlplane.state.records import Deployment, Model, ModelProfile, NodeLedger, Phase, Reservation
from controlplane.state.repository import Change, Delete, Put, State, Versioned
from controlplane.state.worker_groups import GroupPhase, host_of
from placement.solver.cluster import LOAD_WINDOW
from placement.types import Device, DeviceKey, Inventory, Placement, key_of

Ledgers = Mapping[str, Versioned[NodeLedger]]

MEASURING, COMPRESSING = "measuring:", "compressing:"  # no group is called so: models' names have no colon


@dataclass(frozen=True)
class MemoryUsage:
    """Where a device's memory is: the parts, and what is `free` for the next placement, sum to its total,
    unless more is taken than there is.

    `ours` is, for each holder of a reservation here, what it was promised, or what its processes have taken
    if that is more; `others` is taken by anybody else; `headroom` is left free.
    """

    ours: Mapping[str, int]
    others: int
    headroom: int
    free: int


def measuring(key: str) -> str:
    """The holder of what is reserved to measure the profile of this key."""
    return MEASURING + key


def compressing(name: str) -> str:
    """The holder of what is reserved to make the delta of this model."""
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

    It replaces all that `holder`, and the holders that it is `preempting`, had reserved before.
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
    """Reserve so many bytes of each device to measure a profile, instead of what it had."""
    return _reserve(state, measuring(key), uid, devices, memory_bytes, now_s)


def reserve_to_compress(
    state: State, name: str, uid: int, device: DeviceKey, memory_bytes: int, now_s: float
) -> list[Change]:
    """Reserve so many bytes of a device to make the delta of a model, instead of what it had."""
    return _reserve(state, compressing(name), uid, [device], memory_bytes, now_s)


def _reserve(
    state: State, holder: str, uid: int, devices: Sequence[DeviceKey], memory_bytes: int, now_s: float
) -> list[Change]:
    wanted: dict[str, list[Reservation]] = defaultdict(list)
    for rank, (node, kind, index) in enumerate(devices):
        wanted[node].append(Reservation(holder, uid, rank, kind, index, memory_bytes, now_s))
    return _replaced(state.ledgers, (holder,), wanted)


def release(state: State, *holders: str) -> list[Change]:
    """Take back all that was promised to these."""
    return _replaced(state.ledgers, holders, {})


def being_measured(ledgers: Ledgers) -> dict[DeviceKey, str]:
    """The key of the profile that is measured on each device."""
    return {
        (ledger.record.node, r.kind, r.index): r.holder.removeprefix(MEASURING)
        for ledger in ledgers.values()
        for r in ledger.record.reservations
        if is_measuring(r.holder)
    }


def orphans(state: State) -> list[str]:
    """Holders whose group, deployment, measuring or compressing is gone, or is an earlier one of its name."""
    held = {(r.holder, r.uid) for ledger in state.ledgers.values() for r in ledger.record.reservations}
    gone = {holder for holder, uid in held if uid != _uid_of(state, holder)}
    return sorted(holder for holder in gone if not _is_unreadable(state, holder))


def without_orphans(state: State, holder: str) -> list[Change]:
    """Take back what was promised to groups or measurings of this name that are gone."""
    uid = _uid_of(state, holder)
    changes: list[Change] = []
    for node in _nodes_of(state.ledgers, (holder,)):
        mine = [r for r in state.ledgers[node].record.reservations if r.holder == holder]
        kept = [r for r in mine if r.uid == uid]
        if kept != mine:
            changes += _changed(state.ledgers, node, (holder,), kept)
    return changes


def _uid_of(state: State, holder: str) -> int | None:
    """What tells the holder that there is now from earlier ones of its name; None when there is none."""
    if is_measuring(holder):
        profile = state.profiles.get(holder.removeprefix(MEASURING))
        return profile.record.rounds if profile and profile.record.phase is Phase.PROFILING else None
    if holder.startswith(COMPRESSING):
        return _uid_compressing(state, holder.removeprefix(COMPRESSING))
    deployment = state.deployments.get(host_of(holder))
    return deployment.record.uid if deployment and holder in deployment.record.group_ids() else None


def _is_unreadable(state: State, holder: str) -> bool:
    """Whether the record that would tell is there, but cannot be read."""
    if is_measuring(holder):
        return state.unreadable(ModelProfile, holder.removeprefix(MEASURING))
    if holder.startswith(COMPRESSING):
        return state.unreadable(Model, holder.removeprefix(COMPRESSING))
    return state.unreadable(Deployment, host_of(holder))


def _uid_compressing(state: State, name: str) -> int | None:
    model = state.models.get(name)
    return model.record.uid if model and model.record.phase is Phase.COMPRESSING else None


def available(
    inventory: Inventory, ledgers: Ledgers, headroom: float, exclude: str = "", measured: bool = True
) -> Inventory:
    """The inventory with what is free for the next placement: memory, and the time of each device.

    `headroom` is the share of each device to leave free. What `exclude` was promised does not count: it is
    to be placed anew. Without `measured` it is what will be free once nothing is measured any more.
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
    """The share of its time that a device will be busy as far as that is known from the recent past: with the
    work of others, and of the engines that have `promises` there. Measuring, compressing and our own
    processes end or rest, and engines that have no promise any more are gone."""
    passing = sum(
        share
        for holder, share in device.work
        if holder not in promises or is_measuring(holder) or holder.startswith(COMPRESSING)
    )
    return min(1.0, max(0.0, device.load - passing))


def busy_with_others(inventory: Inventory, held: Collection[DeviceKey], profile: str) -> float | None:
    """The share of their time that other work takes of the devices which the measuring of a profile has, the
    most of them. None: none of them is seen."""
    shares = [
        device.load - sum(share for holder, share in device.work if holder == measuring(profile))
        for device in inventory.devices
        if key_of(device) in held
    ]
    return min(1.0, max(0.0, *shares)) if shares else None


def without_starts(inventory: Inventory, state: State, now_s: float) -> Inventory:
    """The inventory without what engines did in the samples' time while they started: reading weights and
    compiling is over once they serve."""
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
    """Bytes by device and holder."""
    promises: dict[DeviceKey, dict[str, int]] = {}
    for ledger in ledgers.values():
        for r in ledger.record.reservations:
            if r.holder != exclude:
                holders = promises.setdefault((ledger.record.node, r.kind, r.index), {})
                holders[r.holder] = holders.get(r.holder, 0) + r.memory_bytes
    return promises


def stale_holders(inventory: Inventory, ledgers: Ledgers, exclude: str = "") -> frozenset[str]:
    """Holders that have memory of a device but no reservation there: engines that stopped or are stopping."""
    promises = promised(ledgers, exclude)
    return frozenset(
        use.holder
        for d in inventory.devices
        for use in d.uses
        if use.holder and use.holder not in promises.get(key_of(d), {})
    )


def memory_usage(device: Device, promises: Mapping[str, int], headroom: float) -> MemoryUsage:
    """Where the memory of one device is, given the bytes promised by holder.

    A process that the node cannot name (it is in another container) is taken for one of a holder whose
    engine is not seen, up to what that was promised.
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
    """`wanted`, by node, in the place of all that `holders` have."""
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
    """The node's ledger with `wanted` in the place of what `holders` have in it."""
    ledger = ledgers.get(node)
    others = [r for r in ledger.record.reservations if r.holder not in holders] if ledger else []
    reservations = (*others, *wanted)
    version = ledger.version if ledger else 0
    if reservations:
        return [Put(NodeLedger(node, reservations), version)]
    return [Delete(NodeLedger, node, version)] if ledger else []
