"""How many worker groups a deployment should have by its load. Pure.

As autoscalers do that stabilise over a window (Kubernetes' HPA): more groups once the least of a short window
asks for them, one fewer once the most of a longer one does not need it. Between the two lies a band in which
nothing changes. Only what was seen with the groups that are there now counts: while one starts, requests pile
up that it will take. From none there is no waiting, and to none it takes a time without any request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from controlplane.state import deployments
from controlplane.state.records import MIN_TARGET, Deployment, Scaling
from controlplane.state.worker_groups import GroupPhase, WorkerGroup, is_spare, next_number

UP_S = 5.0
DOWN_S = 60.0
# After so long without a sample what was known before says nothing any more.
GAP_S = 5.0
# A group goes only if those that stay have at most this share of their target each. Answers take longer the
# more requests share an engine, so more will be under way then.
BAND = 0.5


@dataclass(frozen=True)
class History:
    """Requests under way, (time, number), of the last DOWN_S, oldest first; `busy_s` is when there were some
    last, or a group started, or when it was first looked at. Since `steady_s` there are `groups`, and none of
    them starts."""

    steady_s: float
    busy_s: float
    groups: int = 0
    samples: tuple[tuple[float, float], ...] = ()


def noted(
    history: History | None, in_flight: float, now_s: float, groups: int, starting: bool = False
) -> History:
    """With one sample more; `starting`: one of the groups is, and cannot be idle before it has served."""
    known = history or History(now_s, now_s, groups)
    if known.samples and not 0 <= now_s - known.samples[-1][0] <= GAP_S:
        known = History(now_s, now_s, groups)
    return History(
        steady_s=now_s if starting or groups != known.groups else known.steady_s,
        busy_s=now_s if starting or in_flight > 0 else known.busy_s,
        groups=groups,
        samples=(*(s for s in known.samples if s[0] >= now_s - DOWN_S), (now_s, in_flight)),
    )


def wanted(scaling: Scaling, target: float, current: int, history: History, now_s: float) -> int:
    """How many groups there should be where there are `current`, with `target` requests under way in each."""
    latest = history.samples[-1][1] if history.samples else 0.0
    if scaling.min_groups == 0 and latest <= 0 and (current == 0 or now_s - history.busy_s >= scaling.idle_s):
        return 0
    steady_s = now_s - history.steady_s if history.groups == current else 0.0
    count = current
    if current == 0:
        count = _needed(latest, target)
    elif steady_s >= UP_S:
        count = max(count, min(_needed(n, target) for at, n in history.samples if at >= now_s - UP_S))
    if steady_s >= DOWN_S and max(_needed(n, target * BAND) for _, n in history.samples) < current:
        count = current - 1
    return bounded(scaling, count)


def bounded(scaling: Scaling, count: int) -> int:
    """So many, or the nearest number that there may be."""
    return min(max(count, scaling.min_groups), max(1, scaling.min_groups, scaling.max_groups))


def _needed(in_flight: float, target: float) -> int:
    return max(1, math.ceil(in_flight / max(MIN_TARGET, target) - 1e-9))


def active(deployment: Deployment) -> int:
    """How many groups it has or is to have; one that only replaces another does not count."""
    return len(_counted(deployment.groups))


def _counted(groups: tuple[WorkerGroup, ...]) -> list[WorkerGroup]:
    return [g for g in groups if g.phase is not GroupPhase.DRAINING and not is_spare(g, groups)]


def resized(deployment: Deployment, count: int) -> Deployment:
    """With groups to be placed added, or drained: those first that are not there yet, then the newest."""
    groups = deployment.groups
    for _ in range(count - active(deployment)):
        groups = (*groups, WorkerGroup(next_number(groups), kind=deployment.device_kind))
    excess = active(deployment) - count
    going = sorted(_counted(groups), key=_worth)[: max(0, excess)]
    draining = {group.number for group in going}
    draining |= {group.number for group in groups if group.replaces in draining}
    return deployments.with_derived_phase(
        replace(
            deployment,
            groups=tuple(
                replace(g, phase=GroupPhase.DRAINING, reason="") if g.number in draining else g
                for g in groups
            ),
        )
    )


def _worth(group: WorkerGroup) -> tuple[int, int]:
    order = (GroupPhase.PENDING, GroupPhase.STARTING, GroupPhase.SERVING)
    return order.index(group.phase), -group.number
