"""Moves that free a whole device, or make room for a newcomer, and their costs. Pure.

A move starts a group's engine in its new place before the old one is drained, so both hold memory for a
while. All moves of a proposal are possible at the same time, before any old engine is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from placement.types import CPU, Device, DeviceKey, Inventory, Placement, key_of


@dataclass(frozen=True)
class Tenant:
    """A serving worker group: starting it again reads `load_bytes`, and took `start_s` the last time."""

    name: str
    placement: Placement
    load_bytes: int
    start_s: float


@dataclass(frozen=True)
class Move:
    """Move `tenant` to `placement`. `avoid` is every other device of the inventory: there the group might
    take the place of another move of the proposal."""

    tenant: Tenant
    placement: Placement
    avoid: tuple[DeviceKey, ...]


@dataclass(frozen=True)
class Proposal:
    """A set of moves. `freed` is a device without any of our groups afterwards; `newcomer` is the place that
    is made for the waiting deployment."""

    moves: tuple[Move, ...]
    freed: Device | None = None
    newcomer: Placement | None = None

    @property
    def load_bytes(self) -> int:
        return sum(move.tenant.load_bytes for move in self.moves)

    @property
    def doubled_bytes(self) -> int:
        """Memory that the moved groups hold twice until the old engines are stopped."""
        return sum(rank.memory_bytes for move in self.moves for rank in move.tenant.placement.ranks)


# A place for the named group in this inventory; None: there is none. During the decision the groups of these
# moves are in both places or, with True, only in their new places.
Decide = Callable[[str, Inventory, Sequence[Move], bool], Placement | None]


def to_free_a_device(
    inventory: Inventory, tenants: Sequence[Tenant], decide: Decide, staying: Sequence[Placement] = ()
) -> Proposal | None:
    """The cheapest moves, in bytes to load, after which more devices have none of our groups than before.

    `staying` are placements of groups that cannot be moved.
    """
    empty = len(_empty(inventory, (*(t.placement for t in tenants), *staying)))
    stuck = {key for placement in staying for key in _keys(placement)}
    proposals: list[Proposal] = []
    for device in inventory.devices:
        if key_of(device) in stuck:
            continue
        moves = _moves(inventory, _on(tenants, key_of(device)), decide, device)
        if moves and len(_empty(inventory, (*_after(tenants, moves), *staying))) > empty:
            proposals.append(Proposal(moves, freed=device))
    return min(proposals, key=_cost, default=None)


def to_fit(inventory: Inventory, tenants: Sequence[Tenant], decide: Decide, newcomer: str) -> Proposal | None:
    """The cheapest moves after which `newcomer` has a place: no group, one group, or all groups of a
    device."""
    if (place := decide(newcomer, inventory, (), True)) is not None:
        return Proposal((), newcomer=place)
    return _best(inventory, decide, newcomer, _single(inventory, tenants, decide)) or _best(
        inventory, decide, newcomer, _of_devices(inventory, tenants, decide)
    )


def _best(
    inventory: Inventory, decide: Decide, newcomer: str, options: Iterable[tuple[Move, ...]]
) -> Proposal | None:
    for moves in sorted(options, key=lambda moves: _cost(Proposal(moves))):
        place = decide(newcomer, after(inventory, moves), moves, True)
        if place is not None:
            return Proposal(moves, newcomer=place)
    return None


def _single(inventory: Inventory, tenants: Sequence[Tenant], decide: Decide) -> Iterator[tuple[Move, ...]]:
    for tenant in tenants:
        avoid = tuple(dict.fromkeys(_keys(tenant.placement)))
        move = _move(inventory, tenant, decide, avoid, ())
        if move is not None:
            yield (move,)


def _of_devices(
    inventory: Inventory, tenants: Sequence[Tenant], decide: Decide
) -> Iterator[tuple[Move, ...]]:
    for device in inventory.devices:
        if moves := _moves(inventory, _on(tenants, key_of(device)), decide, device):
            yield moves


def _moves(
    inventory: Inventory, tenants: Sequence[Tenant], decide: Decide, device: Device
) -> tuple[Move, ...]:
    """Moves of all these tenants off the device, the largest first; empty if a tenant has no other place."""
    moves: tuple[Move, ...] = ()
    for tenant in sorted(tenants, key=lambda t: (-sum(r.memory_bytes for r in t.placement.ranks), t.name)):
        move = _move(during(inventory, moves), tenant, decide, (key_of(device),), moves)
        if move is None:
            return ()
        moves = (*moves, move)
    return moves


def _move(
    inventory: Inventory,
    tenant: Tenant,
    decide: Decide,
    avoid: tuple[DeviceKey, ...],
    others: Sequence[Move],
) -> Move | None:
    place = decide(tenant.name, _alike(without(inventory, avoid), tenant), others, False)
    if place is None:
        return None
    kept = set(_keys(place))
    return Move(tenant, place, tuple(k for d in inventory.devices if (k := key_of(d)) not in kept))


def _alike(inventory: Inventory, tenant: Tenant) -> Inventory:
    """Only GPUs for a group on GPUs, and only CPU hosts for a group on CPU hosts."""
    on_cpu = tenant.placement.ranks[0].device_kind == CPU
    return replace(inventory, devices=tuple(d for d in inventory.devices if (d.kind == CPU) == on_cpu))


def without(inventory: Inventory, avoid: Sequence[DeviceKey]) -> Inventory:
    """The inventory without these devices."""
    return replace(inventory, devices=tuple(d for d in inventory.devices if key_of(d) not in avoid))


def during(inventory: Inventory, moves: Iterable[Move]) -> Inventory:
    """Free memory while the moved groups are in both places."""
    return less(inventory, (move.placement for move in moves))


def after(inventory: Inventory, moves: Sequence[Move]) -> Inventory:
    """Free memory after the moved groups have left their old places."""
    gone = {key: -size for key, size in taken_by(move.tenant.placement for move in moves).items()}
    return _less(during(inventory, moves), gone)


def less(inventory: Inventory, placements: Iterable[Placement]) -> Inventory:
    """Free memory after these placements are added."""
    return _less(inventory, taken_by(placements))


def _less(inventory: Inventory, taken: Mapping[DeviceKey, int]) -> Inventory:
    def left(device: Device) -> int:
        return min(device.total_bytes, max(0, device.free_bytes - taken.get(key_of(device), 0)))

    return replace(inventory, devices=tuple(replace(d, free_bytes=left(d)) for d in inventory.devices))


def taken_by(placements: Iterable[Placement]) -> dict[DeviceKey, int]:
    """Bytes that these placements take of each device."""
    taken: dict[DeviceKey, int] = {}
    for placement in placements:
        for key, rank in zip(_keys(placement), placement.ranks, strict=True):
            taken[key] = taken.get(key, 0) + rank.memory_bytes
    return taken


def _after(tenants: Sequence[Tenant], moves: Sequence[Move]) -> list[Placement]:
    moved = {move.tenant.name: move.placement for move in moves}
    return [moved.get(tenant.name, tenant.placement) for tenant in tenants]


def _empty(inventory: Inventory, placements: Iterable[Placement]) -> set[DeviceKey]:
    return {key_of(d) for d in inventory.devices} - {key for p in placements for key in _keys(p)}


def _on(tenants: Sequence[Tenant], device: DeviceKey) -> list[Tenant]:
    return [tenant for tenant in tenants if device in _keys(tenant.placement)]


def _keys(placement: Placement) -> list[DeviceKey]:
    return [rank.device for rank in placement.ranks]


def _cost(proposal: Proposal) -> tuple[int, int, list[str]]:
    return proposal.load_bytes, len(proposal.moves), [move.tenant.name for move in proposal.moves]
