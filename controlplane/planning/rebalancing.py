"""Moves of worker groups: how they are proposed, how they begin and how they end. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from controlplane import errors
from controlplane.planning import placement_decision, reclaimable_memory
from controlplane.planning.reclaimable_memory import FreeMemory
from controlplane.profiling import queue
from controlplane.profiling.calibrations import measurements_of
from controlplane.settings import Settings
from controlplane.state import deployments
from controlplane.state.records import AutoRelax, Deployment, Model, Phase
from controlplane.state.repository import Change, Put, State
from controlplane.state.worker_groups import (
    GroupPhase,
    WorkerGroup,
    base_of,
    group_id_of,
    is_spare,
    kind_of,
    next_number,
    number_of,
)
from placement.rebalancing import Move, Proposal, Tenant, to_fit, to_free_a_device
from placement.types import Inventory, Placement


@dataclass(frozen=True)
class RebalanceOutcome:
    """The proposal that reaches `goal`, or None.

    `newcomer` is the group that it makes room for. `refusal` says why there is no place without moves.
    """

    goal: str
    proposal: Proposal | None
    newcomer: str = ""
    refusal: str = ""


def propose(
    state: State, inventory: Inventory, settings: Settings, newcomer: Deployment | None = None
) -> RebalanceOutcome:
    """Moves that make room for `newcomer`, a deployment that does not exist yet.

    Without a newcomer they make room for a group that waits for a place: the first one that moves can help.
    Where no group waits, they free a device.

    Errors: NotReady while earlier moves are under way.
    """
    present = [d.record for d in state.deployments.values()]
    lasting = [d for d in present if d.phase is not Phase.DELETING]
    if busy := [group_id for d in lasting for group_id in _spares(d)]:
        raise errors.NotReady(
            f"{', '.join(busy)} is being moved already; rebalance again when the move is done"
        )
    seen = reclaimable_memory.free_memory(inventory, state.ledgers, settings.headroom)
    free = seen.now
    tenants = _tenants(state, lasting)
    movable = frozenset(tenant.name for tenant in tenants)
    places = _Places(state, settings, newcomer, movable)
    waiting = [newcomer.model] if newcomer else _waiting(lasting)
    for group_id in waiting:
        goal = f"make room for {group_id}"
        if reason := places.waiting_reason(group_id, seen):
            return RebalanceOutcome(goal, None, group_id, refusal=f"there is room, but {reason}")
        if (proposal := to_fit(free, tenants, places.decide, group_id)) is not None:
            return RebalanceOutcome(goal, proposal, group_id)
    if waiting:
        refusals = {group_id: places.refusal(group_id, free) for group_id in waiting}
        return RebalanceOutcome(f"make room for {' or '.join(waiting)}", None, refusal=_joined(refusals))
    staying = _staying(present, movable)
    return RebalanceOutcome("free a device", to_free_a_device(free, tenants, places.decide, staying))


@dataclass(frozen=True)
class _Places:
    """Decides places on one state: for `newcomer`, for waiting groups and for the `movable` groups."""

    state: State
    settings: Settings
    newcomer: Deployment | None
    movable: frozenset[str]

    def decide(
        self, group_id: str, free: Inventory, moves: Sequence[Move], settled: bool
    ) -> Placement | None:
        try:
            return self._place(group_id, free, moves, settled)
        except errors.NoFeasiblePlan:
            return None

    def waiting_reason(self, group_id: str, seen: FreeMemory) -> str:
        """The measurement that holds the place which the group would get; empty if none. It ends without
        moves."""
        if not seen.measured:
            return ""
        try:
            place = reclaimable_memory.place(lambda free: self._place(group_id, free, (), True), seen)
        except errors.NoFeasiblePlan:
            return ""
        return queue.waiting_reason(self.state, place.victims) if place.victims else ""

    def refusal(self, group_id: str, free: Inventory) -> str:
        """Why there is no place without moves."""
        try:
            self._place(group_id, free, (), True)
        except errors.NoFeasiblePlan as e:
            return e.message
        return ""

    def _place(self, group_id: str, free: Inventory, moves: Sequence[Move], settled: bool) -> Placement:
        """Errors: NoFeasiblePlan."""
        state, base, deployment = self.state, base_of(group_id), self._deployment(group_id)
        group = deployment.group(number_of(group_id))
        present = [d.record for d in state.deployments.values()]
        others = placement_decision.exclude_group(_moved(present, moves, settled), group_id)
        return placement_decision.decide(
            state.models[base].record,
            deployment,
            placement_decision.suited(free, group.device_kind if group else ""),
            self.settings,
            state.variants_of(base),
            measurements_of(state, self.settings, free.devices),
            others,
        )

    def _deployment(self, group_id: str) -> Deployment:
        """The deployment of a group, with the limits that the group's new place has to meet."""
        base = base_of(group_id)
        if self.newcomer and base == self.newcomer.model:
            return self.newcomer
        deployment = self.state.deployments[base].record
        return unrelaxed(deployment) if group_id in self.movable else deployment


def _joined(refusals: Mapping[str, str]) -> str:
    if len(refusals) == 1:
        return next(iter(refusals.values()))
    return "; ".join(f"{group_id}: {reason}" for group_id, reason in refusals.items())


def unrelaxed(deployment: Deployment) -> Deployment:
    """The deployment as a moved group must meet it: no limit is relaxed for a move."""
    return replace(deployment, auto_relax=AutoRelax())


def begun(state: State, proposal: Proposal) -> list[Change]:
    """For each move, a group to be started in the new place. Once it serves, the old group is drained."""
    changed: dict[str, Deployment] = {}
    for move in proposal.moves:
        base = base_of(move.tenant.name)
        deployment = changed.get(base) or state.deployments[base].record
        spare = WorkerGroup(
            next_number(deployment.groups),
            reason=f"replaces {move.tenant.name}",
            replaces=number_of(move.tenant.name),
            avoid=move.avoid,
            kind=kind_of(move.placement),
        )
        changed[base] = deployments.with_spare(deployment, spare)
    return [Put(record, state.deployments[base].version) for base, record in changed.items()]


MORE_ROOM = "with room for the variants that are registered now"


def renewed(deployment: Deployment, purpose: str = MORE_ROOM) -> Deployment:
    """The deployment with a new group for each that serves, to be placed with room for the variants that are
    registered then. Once it serves, the old group is drained. `purpose` goes into its reason.

    Errors: NotReady while no group serves, or earlier moves are under way.
    """
    name = deployment.model
    if busy := _spares(deployment):
        raise errors.NotReady(f"{', '.join(busy)} is replacing another engine; try again when that is done")
    serving = deployment.serving_ids()
    if not serving:
        raise errors.NotReady(
            f"'{name}' has no serving engine to replace; its next engine will have room for its variants"
        )
    for group_id in serving:
        spare = WorkerGroup(
            next_number(deployment.groups),
            reason=f"replaces {group_id}, {purpose}",
            replaces=number_of(group_id),
            kind=deployment.device_kind,
        )
        deployment = deployments.with_spare(deployment, spare)
    return deployment


def retired(deployment: Deployment, number: int) -> Deployment:
    """The deployment once its group `number` serves: the group that this one replaces is drained."""
    successor = deployment.group(number)
    replaced = successor.replaces if successor else None
    groups = []
    for group in deployment.groups:
        if group.number == number:
            groups.append(replace(group, replaces=None, avoid=()))
        elif group.number == replaced:
            groups.append(replace(group, phase=GroupPhase.DRAINING, reason=""))
        else:
            groups.append(group)
    return deployments.with_derived_phase(replace(deployment, groups=tuple(groups)))


def _spares(deployment: Deployment) -> list[str]:
    return [
        group_id_of(deployment.base, g.number) for g in deployment.groups if is_spare(g, deployment.groups)
    ]


def _waiting(deployments: Iterable[Deployment]) -> list[str]:
    """Groups that the cluster had no room for, one of each deployment, since its others need the same."""
    waiting = {
        d.base: [g.number for g in d.groups if g.refused_on and g.phase is not GroupPhase.DRAINING]
        for d in deployments
        if d.model == d.base
    }
    return sorted(group_id_of(base, min(numbers)) for base, numbers in waiting.items() if numbers)


def _staying(deployments: Iterable[Deployment], movable: Container[str]) -> list[Placement]:
    """The placements of groups that cannot be moved: they start, are drained, or are being undeployed."""
    return [
        group.placement
        for d in deployments
        for group_id, group in zip(d.group_ids(), d.groups, strict=True)
        if group.placement and group_id not in movable
    ]


def _tenants(state: State, deployments: Iterable[Deployment]) -> list[Tenant]:
    """The groups that serve, in the order of their ids."""
    tenants = {
        group_id: Tenant(group_id, group.placement, _load_bytes(state.models[d.base].record), group.start_s)
        for d in deployments
        for group_id, group in zip(d.group_ids(), d.groups, strict=True)
        if group.phase is GroupPhase.SERVING and group.placement and d.base in state.models
    }
    return [tenants[group_id] for group_id in sorted(tenants)]


def _load_bytes(model: Model) -> int:
    return model.spec.weight_bytes if model.spec else 0


def _moved(deployments: Iterable[Deployment], moves: Sequence[Move], settled: bool) -> list[Deployment]:
    """The deployments with moved groups in both places, or once `settled` only in the new ones."""
    move_of = {move.tenant.name: move for move in moves}
    return [replace(d, groups=_moved_groups(d, move_of, settled)) for d in deployments]


def _moved_groups(deployment: Deployment, moves: dict[str, Move], settled: bool) -> tuple[WorkerGroup, ...]:
    groups = deployment.groups
    for group_id, group in zip(deployment.group_ids(), deployment.groups, strict=True):
        if (move := moves.get(group_id)) is None:
            continue
        groups = (*groups, WorkerGroup(next_number(groups), placement=move.placement))
        if settled:
            groups = tuple(replace(g, placement=None) if g.number == group.number else g for g in groups)
    return groups
