"""The number of worker groups that a deployment should have under its load. Pure.

The load is judged over windows, as by Kubernetes' HPA. Groups are added when even the lowest load of a short
window needs more. A group is removed when even the highest load of a longer window needs fewer. Between the
two lies a band in which nothing changes. Only loads that were seen with today's groups count: while a group
starts, requests pile up that it will take. The first group is added at once, and the last one is removed only
after a time without any request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from controlplane.state import deployments
from controlplane.state.records import Deployment, Scaling
from controlplane.state.terms import MIN_TARGET
from controlplane.state.worker_groups import GroupPhase, WorkerGroup, is_spare, next_number

UP_S = 5.0
DOWN_S = 60.0
# After a gap this long between two samples, older samples are ignored.
GAP_S = 5.0
# A group is removed only if each of the others then has at most this share of its target. Answers take longer
# the more requests share an engine, so more requests will be under way then.
BAND = 0.5


class Sample(NamedTuple):
    """The requests under way at a time."""

    at_s: float
    in_flight: float


@dataclass(frozen=True)
class History:
    """`samples` are those of the last DOWN_S, the oldest first.

    `busy_s` is when a request was last under way or a group last started; at first, when the history began.
    Since `steady_s` the number of `groups` is the same, and none of them starts.
    """

    steady_s: float
    busy_s: float
    groups: int = 0
    samples: tuple[Sample, ...] = ()


def noted(
    history: History | None, in_flight: float, now_s: float, groups: int, starting: bool = False
) -> History:
    """The history with one more sample. A group that is `starting` is not idle before it has served."""
    known = history or History(now_s, now_s, groups)
    if known.samples and not 0 <= now_s - known.samples[-1].at_s <= GAP_S:
        known = History(now_s, now_s, groups)
    return History(
        steady_s=now_s if starting or groups != known.groups else known.steady_s,
        busy_s=now_s if starting or in_flight > 0 else known.busy_s,
        groups=groups,
        samples=(*(s for s in known.samples if s.at_s >= now_s - DOWN_S), Sample(now_s, in_flight)),
    )


def wanted(scaling: Scaling, target: float, current: int, history: History, now_s: float) -> int:
    """The target number of groups instead of `current`, for `target` requests under way in each."""
    latest = history.samples[-1].in_flight if history.samples else 0.0
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
    """`count`, or the nearest number that the deployment allows."""
    return min(max(count, scaling.min_groups), max(1, scaling.min_groups, scaling.max_groups))


def _needed(in_flight: float, target: float) -> int:
    return max(1, math.ceil(in_flight / max(MIN_TARGET, target) - 1e-9))


def active(deployment: Deployment) -> int:
    """How many groups it has or will have. A spare, which only replaces another group, does not count."""
    return len(_counted(deployment.groups))


def _counted(groups: tuple[WorkerGroup, ...]) -> list[WorkerGroup]:
    return [g for g in groups if g.phase is not GroupPhase.DRAINING and not is_spare(g, groups)]


def resized(deployment: Deployment, count: int) -> Deployment:
    """The deployment with groups added, to be placed, or drained: first groups that do not serve yet, then
    the newest."""
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
