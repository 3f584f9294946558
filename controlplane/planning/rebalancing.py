"""Moves of worker groups: what is proposed on the newest state, how it begins and how it ends. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from controlplane import errors
from controlplane.planning import placement_decision, reclaimable_memory
from controlplane.planning.reclaimable_memory import FreeMemory
from controlplane.profiling import queue
from controlplane.settings import Settings
from controlplane.state import deployments
from controlplane.state.records import AutoRelax, Deployment, Model, Phase
from controlplane.state.repository import Change, Put, State
from controlplane.state.worker_groups import (
    GroupPhase,
    WorkerGroup,
    group_id_of,
    host_of,
    is_spare,
    kind_of,
    next_number,
    number_of,
)
from placement.rebalancing import Move, Proposal, Tenant, to_fit, to_free_a_device
from placement.types import Inventory, Placement


@dataclass(frozen=True)
class Asked:
    """A proposal, or none; `goal` says what was looked for, `newcomer` for whom, `refusal` why that finds no
    place as things are."""

    goal: str
    proposal: Proposal | None
    newcomer: str = ""
    refusal: str = ""


def propose(
    state: State, inventory: Inventory, settings: Settings, newcomer: Deployment | None = None
) -> Asked:
    """Moves that make room for `newcomer`, a deployment that is not there yet; without one for a group that
    found no place, the first that moves help; where nothing waits, moves that free a device.

    Errors: NotReady while earlier moves are under way.
    """
    present = [found.record for found in state.deployments.values()]
    lasting = [d for d in present if d.phase is not Phase.DELETING]
    if busy := [name for d in lasting for name in _spares(d)]:
        raise errors.NotReady(f"{', '.join(busy)} is being moved to; rebalance when that is done")
    seen = reclaimable_memory.free_memory(inventory, state.ledgers, settings.headroom)
    free = seen.now
    tenants = _tenants(state, lasting)
    movable = frozenset(tenant.name for tenant in tenants)
    places = _Places(state, settings, newcomer, movable)
    names = [newcomer.model] if newcomer else _waiting(lasting)
    for name in names:
        if waits := places.waits(name, seen):
            return Asked(f"make room for {name}", None, name, refusal=f"it fits, and {waits}")
        if (found := to_fit(free, tenants, places.decide, name)) is not None:
            return Asked(f"make room for {name}", found, name)
    if names:
        refusals = {name: places.refusal(name, free) for name in names}
        return Asked(f"make room for {' or '.join(names)}", None, refusal=_in_one(refusals))
    staying = _staying(present, movable)
    return Asked("free a device", to_free_a_device(free, tenants, places.decide, staying))


@dataclass(frozen=True)
class _Places:
    """Decides, on one state, places for `newcomer`, for groups that wait and for the `movable` ones."""

    state: State
    settings: Settings
    newcomer: Deployment | None
    movable: frozenset[str]

    def decide(self, name: str, free: Inventory, moves: Sequence[Move], settled: bool) -> Placement | None:
        try:
            return self._place(name, free, moves, settled)
        except errors.NoFeasiblePlan:
            return None

    def waits(self, name: str, seen: FreeMemory) -> str:
        """What is measured now where there would be a place: that ends without moves."""
        if not seen.measured:
            return ""
        try:
            found = reclaimable_memory.place(lambda free: self._place(name, free, (), True), seen)
        except errors.NoFeasiblePlan:
            return ""
        return queue.waiting_reason(self.state, found.victims) if found.victims else ""

    def refusal(self, name: str, free: Inventory) -> str:
        """Why there is no place without moves."""
        try:
            self._place(name, free, (), True)
        except errors.NoFeasiblePlan as e:
            return e.message
        return ""

    def _place(self, name: str, free: Inventory, moves: Sequence[Move], settled: bool) -> Placement:
        """Errors: NoFeasiblePlan."""
        state, host, asked = self.state, host_of(name), self._asked(name)
        group = asked.group(number_of(name))
        present = [found.record for found in state.deployments.values()]
        others = placement_decision.exclude_group(_moved(present, moves, settled), name)
        return placement_decision.decide(
            state.models[host].record,
            asked,
            placement_decision.suited(free, group.device_kind if group else ""),
            self.settings,
            state.variants_of(host),
            state.profiles,
            others,
        )

    def _asked(self, name: str) -> Deployment:
        host = host_of(name)
        if self.newcomer and host == self.newcomer.model:
            return self.newcomer
        deployment = self.state.deployments[host].record
        return unrelaxed(deployment) if name in self.movable else deployment


def _in_one(refusals: Mapping[str, str]) -> str:
    if len(refusals) == 1:
        return next(iter(refusals.values()))
    return "; ".join(f"{name}: {why}" for name, why in refusals.items())


def unrelaxed(deployment: Deployment) -> Deployment:
    """What a group that is moved must meet: none of its limits gives way to a move."""
    return replace(deployment, auto_relax=AutoRelax())


def begun(state: State, proposal: Proposal) -> list[Change]:
    """A group to be started in the place that each one moves to; once it serves, the old one is drained."""
    changed: dict[str, Deployment] = {}
    for move in proposal.moves:
        host = host_of(move.tenant.name)
        deployment = changed.get(host) or state.deployments[host].record
        spare = WorkerGroup(
            next_number(deployment.groups),
            reason=f"takes the place of {move.tenant.name}",
            replaces=number_of(move.tenant.name),
            avoid=move.avoid,
            kind=kind_of(move.placement),
        )
        changed[host] = deployments.with_derived_phase(
            replace(deployment, groups=(*deployment.groups, spare))
        )
    return [Put(record, state.deployments[host].version) for host, record in changed.items()]


def retired(deployment: Deployment, number: int) -> Deployment:
    """The group `number` serves: the one that it replaces is drained."""
    group = deployment.group(number)
    replaced = group.replaces if group else None
    groups = []
    for one in deployment.groups:
        if one.number == number:
            groups.append(replace(one, replaces=None, avoid=()))
        elif one.number == replaced:
            groups.append(replace(one, phase=GroupPhase.DRAINING, reason=""))
        else:
            groups.append(one)
    return deployments.with_derived_phase(replace(deployment, groups=tuple(groups)))


def _spares(deployment: Deployment) -> list[str]:
    return [
        group_id_of(deployment.host, g.number) for g in deployment.groups if is_spare(g, deployment.groups)
    ]


def _waiting(deployments: Iterable[Deployment]) -> list[str]:
    """Groups that the cluster had no room for, one of each deployment: its others ask for the same."""
    waiting = {
        d.host: [g.number for g in d.groups if g.refused_on and g.phase is not GroupPhase.DRAINING]
        for d in deployments
        if d.model == d.host
    }
    return sorted(group_id_of(host, min(numbers)) for host, numbers in waiting.items() if numbers)


def _staying(deployments: Iterable[Deployment], movable: Container[str]) -> list[Placement]:
    """Where the groups are that are not moved: they start, leave, or are being undeployed."""
    return [
        group.placement
        for d in deployments
        for name, group in zip(d.group_ids(), d.groups, strict=True)
        if group.placement and name not in movable
    ]


def _tenants(state: State, deployments: Iterable[Deployment]) -> list[Tenant]:
    """The groups that serve, by name."""
    tenants = {
        group_id: Tenant(group_id, group.placement, _load_bytes(state.models[d.host].record), group.start_s)
        for d in deployments
        for group_id, group in zip(d.group_ids(), d.groups, strict=True)
        if group.phase is GroupPhase.SERVING and group.placement and d.host in state.models
    }
    return [tenants[group_id] for group_id in sorted(tenants)]


def _load_bytes(model: Model) -> int:
    return model.spec.weight_bytes if model.spec else 0


def _moved(deployments: Iterable[Deployment], moves: Sequence[Move], settled: bool) -> list[Deployment]:
    """The deployments with moved groups in both places, or, once that is `settled`, only in the new ones."""
    by_name = {move.tenant.name: move for move in moves}
    return [replace(d, groups=_both(d, by_name, settled)) for d in deployments]


def _both(deployment: Deployment, moves: dict[str, Move], settled: bool) -> tuple[WorkerGroup, ...]:
    groups = deployment.groups
    for name, group in zip(deployment.group_ids(), deployment.groups, strict=True):
        if (move := moves.get(name)) is None:
            continue
        groups = (*groups, WorkerGroup(next_number(groups), placement=move.placement))
        if settled:
            groups = tuple(replace(g, placement=None) if g.number == group.number else g for g in groups)
    return groups
