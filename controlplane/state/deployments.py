"""A deployment with changed worker groups, and the phase and reason that follow from them."""

from __future__ import annotations

from dataclasses import replace

from controlplane.state.records import Deployment, Phase
from controlplane.state.worker_groups import GroupPhase, WorkerGroup, group_id_of


def with_group(deployment: Deployment, group: WorkerGroup) -> Deployment:
    """The deployment with this group replacing the group of the same number."""
    groups = tuple(group if existing.number == group.number else existing for existing in deployment.groups)
    return with_derived_phase(replace(deployment, groups=groups))


def without_group(deployment: Deployment, number: int) -> Deployment:
    left = tuple(group for group in deployment.groups if group.number != number)
    return with_derived_phase(replace(deployment, groups=left, kind=deployment.device_kind))


def with_spare(deployment: Deployment, spare: WorkerGroup) -> Deployment:
    """The deployment with a group that is to replace the one in its `replaces`."""
    groups = (
        replace(group, reason="") if group.number == spare.replaces and group.placement else group
        for group in deployment.groups
    )
    return with_derived_phase(replace(deployment, groups=(*groups, spare)))


def without_spare(deployment: Deployment, spare: WorkerGroup, reason: str) -> Deployment:
    """The deployment after `spare` failed to replace another group; that group's reason explains it."""
    spare_id = group_id_of(deployment.base, spare.number)
    staying = deployment.group(spare.replaces) if spare.replaces is not None else None
    if staying is not None and staying.phase is GroupPhase.SERVING:
        told = replace(staying, reason=f"{spare_id} could not replace it: {reason}")
        deployment = with_group(deployment, told)
    return without_group(deployment, spare.number)


def with_derived_phase(deployment: Deployment) -> Deployment:
    """A base's deployment with the phase and the reason that follow from its groups.

    It is Deployed while a group serves. A deployment that may have no group is Deployed, too: its requests
    wait until it has one.
    """
    if deployment.phase is Phase.DELETING:
        return deployment
    serving = sum(group.phase is GroupPhase.SERVING for group in deployment.groups)
    waits = deployment.established and deployment.scaling.min_groups == 0
    phase = Phase.DEPLOYED if serving or waits else Phase.DEPLOYING
    return replace(deployment, phase=phase, reason=_describe(deployment, serving))


def _describe(deployment: Deployment, serving: int) -> str:
    absent = [g for g in deployment.groups if g.phase in (GroupPhase.PENDING, GroupPhase.STARTING)]
    if not absent:
        return "" if serving else "idle, so no engine runs; the next request starts an engine"
    causes = "; ".join(f"{group_id_of(deployment.base, g.number)}: {g.reason}" for g in absent if g.reason)
    if not deployment.established:
        return causes or "engine starting"
    meanwhile = "meanwhile requests are refused with Retry-After"
    if serving:
        meanwhile = f"meanwhile {serving} of {len(deployment.groups)} groups answer"
    elif deployment.scaling.min_groups == 0:
        meanwhile = "meanwhile requests wait"
    return f"{causes or 'engine starting'}; {meanwhile}"
