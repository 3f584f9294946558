"""Who was promised which memory of which device, and what is left for the next: pure functions.

A reservation is committed together with the placement it is for, with the versions of the ledgers of its
nodes as they were read: of two placements that were decided on the same sight of a node one is stale.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from controlplane.records import NodeLedger, Reservation
from controlplane.state.typed import Change, Delete, Put, State, Versioned
from controlplane.worker_groups import host_of
from placement.types import Device, DeviceKey, Inventory, Placement, key_of

Ledgers = Mapping[str, Versioned[NodeLedger]]


@dataclass(frozen=True)
class Account:
    """Where a device's memory is: the parts, and what is `free` for the next placement, sum to its total,
    unless more is taken than there is.

    `ours` is, for each worker group with a reservation here, what it was promised, or what its engine has
    taken if that is more; `others` is taken by anybody else; `headroom` is left free.
    """

    ours: Mapping[str, int]
    others: int
    headroom: int
    free: int


def reserve(state: State, holder: str, uid: int, placement: Placement, now_s: float) -> list[Change]:
    """Promise each rank of a placement its memory, in the place of all that `holder` had before."""
    wanted: dict[str, list[Reservation]] = defaultdict(list)
    for r in placement.ranks:
        wanted[r.node].append(
            Reservation(holder, uid, r.rank, r.device_kind, r.device_index, r.memory_bytes, now_s)
        )
    return [
        change
        for node in sorted({*wanted, *_nodes_of(state.ledgers, holder)})
        for change in _changed(state.ledgers, node, (holder,), wanted[node])
    ]


def release(state: State, *holders: str) -> list[Change]:
    """Take back all that was promised to these."""
    nodes = sorted({node for holder in holders for node in _nodes_of(state.ledgers, holder)})
    return [change for node in nodes for change in _changed(state.ledgers, node, holders, ())]


def orphans(state: State) -> list[str]:
    """Holders whose group or deployment is gone, or is of another deployment of the same name."""
    alive = {
        (holder, found.record.uid)
        for found in state.deployments.values()
        for holder in found.record.group_ids()
    }
    held = {(r.holder, r.uid) for found in state.ledgers.values() for r in found.record.reservations}
    return sorted({holder for holder, uid in held - alive})


def without_orphans(state: State, holder: str) -> list[Change]:
    """Take back what was promised to groups of this name that are gone."""
    found = state.deployments.get(host_of(holder))
    uid = found.record.uid if found and holder in found.record.group_ids() else None
    changes: list[Change] = []
    for node in _nodes_of(state.ledgers, holder):
        mine = [r for r in state.ledgers[node].record.reservations if r.holder == holder]
        kept = [r for r in mine if r.uid == uid]
        if kept != mine:
            changes += _changed(state.ledgers, node, (holder,), kept)
    return changes


def available(inventory: Inventory, ledgers: Ledgers, headroom: float, besides: str = "") -> Inventory:
    """The inventory with what is free for the next placement.

    `headroom` is the share of each device to leave free. What `besides` was promised does not count: it is
    to be placed anew.
    """
    promises = promised(ledgers, besides)
    return replace(
        inventory,
        devices=tuple(
            replace(d, free_bytes=account(d, promises.get(key_of(d), {}), headroom).free)
            for d in inventory.devices
        ),
    )


def promised(ledgers: Ledgers, besides: str = "") -> dict[DeviceKey, dict[str, int]]:
    """Bytes by device and holder."""
    found: dict[DeviceKey, dict[str, int]] = {}
    for ledger in ledgers.values():
        for r in ledger.record.reservations:
            if r.holder != besides:
                holders = found.setdefault((ledger.record.node, r.kind, r.index), {})
                holders[r.holder] = holders.get(r.holder, 0) + r.memory_bytes
    return found


def leaving(inventory: Inventory, ledgers: Ledgers, besides: str = "") -> frozenset[str]:
    """Holders seen on a device that they are promised nothing of: engines that were stopped, or are to be."""
    promises = promised(ledgers, besides)
    return frozenset(
        use.holder
        for d in inventory.devices
        for use in d.uses
        if use.holder and use.holder not in promises.get(key_of(d), {})
    )


def account(device: Device, promises: Mapping[str, int], headroom: float) -> Account:
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
    return Account(ours, others, kept, max(0, device.total_bytes - kept - sum(ours.values()) - others))


def _nodes_of(ledgers: Ledgers, holder: str) -> list[str]:
    return sorted(
        node for node, found in ledgers.items() if any(r.holder == holder for r in found.record.reservations)
    )


def _changed(
    ledgers: Ledgers, node: str, holders: Collection[str], wanted: Iterable[Reservation]
) -> list[Change]:
    """The node's ledger with `wanted` in the place of what `holders` have in it."""
    found = ledgers.get(node)
    others = [r for r in found.record.reservations if r.holder not in holders] if found else []
    reservations = (*others, *wanted)
    version = found.version if found else 0
    if reservations:
        return [Put(NodeLedger(node, reservations), version)]
    return [Delete(NodeLedger, node, version)] if found else []
