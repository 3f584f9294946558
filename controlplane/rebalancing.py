"""Moves of worker groups: what is proposed on the newest state, how it begins and how it ends. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from controlplane import deploying, errors, ledger, replanning
from controlplane.records import Deployment, Model
from controlplane.settings import Settings
from controlplane.state.typed import Change, Put, State
from controlplane.worker_groups import (
    GroupPhase,
    WorkerGroup,
    group_id,
    host_of,
    is_spare,
    next_number,
    number_of,
)
from placement.rebalancing import Move, Proposal, Tenant, to_fit, to_free_a_device
from placement.types import Inventory, Placement


@dataclass(frozen=True)
class Asked:
    """A proposal, or none; `goal` says what was looked for, `newcomer` for whom."""

    goal: str
    proposal: Proposal | None
    newcomer: str = ""


def propose(
    state: State, inventory: Inventory, settings: Settings, newcomer: Deployment | None = None
) -> Asked:
    """Moves that make room for `newcomer`, a deployment that is not there yet; without one for a group that
    found no place; where there is none, moves that free a device.

    Errors: NotReady while earlier moves are under way.
    """
    deployments = [found.record for found in state.deployments.values()]
    if busy := [name for d in deployments for name in _spares(d)]:
        raise errors.NotReady(f"{', '.join(busy)} is being moved to; rebalance when that is done")
    free = ledger.available(inventory, state.ledgers, settings.headroom)
    waiting = None if newcomer else _waiting(deployments)
    tenants = _tenants(state, deployments)

    def decide(name: str, left: Inventory, moves: Sequence[Move], settled: bool) -> Placement | None:
        host = host_of(name)
        deployment = newcomer if newcomer and host == newcomer.model else state.deployments[host].record
        variants = state.variants_of(host)
        others = deploying.besides(_moved(deployments, moves, settled), name)
        model = state.models[host].record
        try:
            return deploying.decide(model, deployment, left, settings, variants, state.profiles, others)
        except errors.NoFeasiblePlan:
            return None

    name = newcomer.model if newcomer else waiting
    if name:
        return Asked(f"make room for {name}", to_fit(free, tenants, decide, name), name)
    return Asked("free a device", to_free_a_device(free, tenants, decide))


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
        )
        changed[host] = replanning.standing(replace(deployment, groups=(*deployment.groups, spare)))
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
    return replanning.standing(replace(deployment, groups=tuple(groups)))


def _spares(deployment: Deployment) -> list[str]:
    return [group_id(deployment.host, g.number) for g in deployment.groups if is_spare(g, deployment.groups)]


def _waiting(deployments: Iterable[Deployment]) -> str | None:
    """A group that the cluster had no room for."""
    names = sorted(group_id(d.host, g.number) for d in deployments for g in d.groups if g.refused_on)
    return next(iter(names), None)


def _tenants(state: State, deployments: Iterable[Deployment]) -> list[Tenant]:
    """The groups that serve, by name."""
    found = {
        name: Tenant(name, group.placement, _load_bytes(state.models[d.host].record), group.start_s)
        for d in deployments
        for name, group in zip(d.group_ids(), d.groups, strict=True)
        if group.phase is GroupPhase.SERVING and group.placement and d.host in state.models
    }
    return [found[name] for name in sorted(found)]


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
