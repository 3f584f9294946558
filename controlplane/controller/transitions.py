"""Changes of records that are committed together: operations end, groups start, serve and are removed."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from controlplane.cluster import reservations
from controlplane.state import deployments
from controlplane.state.operations import End, advance
from controlplane.state.records import Attempts, Deployment, Model, OperationKind, Phase
from controlplane.state.repository import Change, Delete, Put, Repository, State, Versioned
from controlplane.state.transactions import Superseded, persist
from controlplane.state.worker_groups import (
    GroupPhase,
    MeasuredRank,
    WorkerGroup,
    base_of,
    kind_of,
    number_of,
)
from placement.types import EngineSizes, Placement, sizes_of

RM = TypeVar("RM", Model, Deployment)
T = TypeVar("T")


def end_open_operations(state: State, kind: OperationKind, target: str, end: End) -> list[Change]:
    """End the open operations about `target`. Raises Superseded for the success of a cancelled operation."""
    changes: list[Change] = []
    for operation in state.operations.values():
        op = operation.record
        if op.kind is not kind or op.target != target or op.done:
            continue
        if op.cancel_requested and end.phase in (Phase.READY, Phase.DEPLOYED):
            raise Superseded(f"{op.id} is to be cancelled")
        ended = replace(advance(op, end.phase, end.message, time.time(), 1.0), error=end.error)
        changes.append(Put(ended, operation.version))
    return changes


def note_open_operations(
    state: State, kind: OperationKind, target: str, message: str, now_s: float
) -> list[Change]:
    """Add an event to the open operations about `target`, which stay in their phases."""
    return [
        Put(advance(op, op.phase, message, now_s), versioned.version)
        for versioned in state.operations.values()
        if (op := versioned.record).kind is kind and op.target == target and not op.done
    ]


def require_same(records: Mapping[str, Versioned[RM]], name: str, uid: int) -> Versioned[RM]:
    """The record of this name, if it has the same `uid`. Raises Superseded."""
    present = records.get(name)
    if present is None or present.record.uid != uid:
        raise Superseded(name)
    return present


def mark_starting(
    deployment: Deployment,
    group: WorkerGroup,
    placement: Placement,
    memory_excess: int | None,
    now_s: float,
    node_ids: Mapping[str, str] = MappingProxyType({}),
) -> Deployment:
    """Record the start of a group. `memory_excess` is what the plan gives each rank beyond its calibrated
    estimate; `node_ids` are Ray's."""
    if deployment.phase is Phase.DELETING:
        raise Superseded(deployment.model)
    placed = replace(
        group,
        phase=GroupPhase.STARTING,
        placement=placement,
        measured=(),
        memory_excess=memory_excess,
        refused_on="",
        since_s=now_s,
        kind=kind_of(placement),
        node_ids={r.node: node_ids[r.node] for r in placement.ranks if r.node in node_ids},
    )
    begun = replace(
        deployment,
        kind=deployment.device_kind or placed.kind,
        chosen=(deployment.chosen or EngineSizes()).or_else(sizes_of(placement.plan)),
    )
    return deployments.with_group(begun, placed)


def mark_serving(
    state: State, group_id: str, measured: tuple[MeasuredRank, ...], now_s: float
) -> tuple[Change, WorkerGroup]:
    """The deployment whose group `group_id` serves from now on, and that group. Raises Superseded."""
    deployment, group = find_group(state, group_id)
    if group.phase is not GroupPhase.STARTING:
        raise Superseded(group_id)
    serves = replace(
        group,
        phase=GroupPhase.SERVING,
        reason="",
        measured=measured,
        since_s=now_s,
        start_s=now_s - group.since_s,
    )
    established = replace(deployment.record, established=True)
    return Put(deployments.with_group(established, serves), deployment.version), serves


class GroupOfDeployment(NamedTuple):
    """A worker group, and its deployment with the version that was read."""

    deployment: Versioned[Deployment]
    group: WorkerGroup


def find_group(state: State, group_id: str) -> GroupOfDeployment:
    """The group `group_id` and its deployment. Raises Superseded, also when the deployment is being
    undeployed."""
    deployment = state.deployments.get(base_of(group_id))
    group = deployment.record.group(number_of(group_id)) if deployment else None
    if deployment is None or group is None or deployment.record.phase is Phase.DELETING:
        raise Superseded(group_id)
    return GroupOfDeployment(deployment, group)


def find_loading(state: State, name: str, model_uid: int) -> Versioned[Deployment]:
    """The deployment of a variant that is being loaded into engines.

    Raises Superseded when the deployment, or its model, is gone."""
    deployment = state.deployments.get(name)
    if deployment is None or deployment.record.phase not in (Phase.PENDING, Phase.DEPLOYING):
        raise Superseded(name)
    require_same(state.models, name, model_uid)
    return deployment


def mark_deployed(state: State, name: str, model_uid: int) -> Change:
    """The deployment of a variant, served from now on. Raises Superseded as `find_loading` does."""
    deployment = find_loading(state, name, model_uid)
    served = replace(deployment.record, phase=Phase.DEPLOYED, reason="", established=True, loading=Attempts())
    return Put(served, deployment.version)


def mark_unavailable(variant: Versioned[Deployment], reason: str) -> list[Change]:
    """Give an established variant the reason why its base is unavailable; no change if it is the same."""
    if _without_figures(variant.record.reason) == _without_figures(reason):
        return []
    return [Put(replace(variant.record, reason=reason), variant.version)]


def _without_figures(text: str) -> str:
    """The text without ages and free bytes, which differ each time."""
    return re.sub(r"(?<![\w.])\d+\.\d+(?![\w.]*\d)", "", text)


def clear_reasons(state: State, base: str) -> list[Change]:
    """Clear the reasons of a base's variants, because its engine answers again."""
    variants = [d for d in state.deployments.values() if d.record.base == base != d.record.model]
    return [
        Put(replace(d.record, reason=""), d.version)
        for d in variants
        if d.record.reason and d.record.phase is Phase.DEPLOYED
    ]


def delete_deployment(state: State, deployment: Versioned[Deployment]) -> list[Change]:
    """Delete a deployment and release the reservations of its groups."""
    groups = deployment.record.group_ids()
    return [
        Delete(Deployment, deployment.record.model, deployment.version),
        *reservations.release(state, *groups),
    ]


def undo_operation(state: State, operation_id: str) -> Sequence[Change]:
    """Undo what an operation began. Raises Superseded when it has ended."""
    operation = state.operations.get(operation_id)
    if operation is None or operation.record.done:
        raise Superseded(operation_id)
    op = operation.record
    if op.kind is OperationKind.PROFILE:
        return []
    if op.kind is OperationKind.REGISTER:
        return _unregister(state, op.target)
    deployment = state.deployments.get(op.target)
    if deployment is None or deployment.record.phase is Phase.DELETING:
        return []
    return delete_deployment(state, deployment)


def _unregister(state: State, name: str) -> list[Change]:
    """Forget a model; what was made from a fine-tune is removed first."""
    model = state.models.get(name)
    if model is None:
        return []
    if model.record.delta is None:
        return [Delete(Model, name, model.version)]
    return [Put(replace(model.record, phase=Phase.DELETING, reason="being deleted"), model.version)]


def fail_registration(state: State, name: str, uid: int, reason: str) -> list[Change]:
    """Forget a model that cannot be registered; a model to be made here stays, with the reason of the
    failure.

    Raises Superseded when it is gone, or being deleted.
    """
    model = require_same(state.models, name, uid)
    if model.record.delta is None:
        return [Delete(Model, name, model.version)]
    if model.record.phase is Phase.DELETING:
        raise Superseded(name)
    return [
        Put(replace(model.record, phase=Phase.FAILED, reason=reason), model.version),
        *reservations.release(state, reservations.compressing(name)),
    ]


@dataclass(frozen=True)
class NoSuccessor:
    """A group that was to replace another one no longer exists, for this reason."""

    reason: str


Unplace = Callable[[Deployment, State, WorkerGroup], WorkerGroup | NoSuccessor | None]


async def unplace(repository: Repository, group_id: str, change: Unplace) -> None:
    """Commit the change of a group that gives up its place; None: it no longer exists. Raises Superseded.

    `change` gets its deployment, the state and the group.
    """

    def once() -> None:
        state = repository.read()
        versioned, group = find_group(state, group_id)
        match change(versioned.record, state, group):
            case None:
                changed = deployments.without_group(versioned.record, group.number)
            case NoSuccessor(reason):
                changed = deployments.without_spare(versioned.record, group, reason)
            case kept:
                changed = deployments.with_group(versioned.record, kept)
        repository.commit([Put(changed, versioned.version), *reservations.release(state, group_id)])

    await asyncio.to_thread(persist, once)


def is_still(state: State, group_id: str, uid: int, placement: Placement | None) -> bool:
    """Whether the group is unchanged: of the same deployment, and not placed again meanwhile."""
    try:
        deployment, group = find_group(state, group_id)
    except Superseded:
        return False
    return (deployment.record.uid, group.placement) == (uid, placement)


def require_draining(state: State, group_id: str, uid: int) -> None:
    """Raises Superseded when the group is not draining, or belongs to another deployment than `uid`."""
    deployment, group = find_group(state, group_id)
    if deployment.record.uid != uid or group.phase is not GroupPhase.DRAINING:
        raise Superseded(group_id)
