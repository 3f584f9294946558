"""The gateways' reports of requests under way, kept as long as scaling looks back.

They are in no record: a restarted controller observes for a while before it changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from controlplane.planning import autoscaling
from controlplane.planning.engine_sizes import known_sizes
from controlplane.state.records import Deployment, Phase
from controlplane.state.worker_groups import GroupPhase
from placement.solver.sizing import USUAL_REQUESTS


class DemandBook:
    """Recent requests of each base, and the resulting target number of groups of its deployment."""

    def __init__(self) -> None:
        self._seen: dict[str, autoscaling.History] = {}
        self._now_s = 0.0
        self._silent = True

    def note(
        self, deployments: Sequence[Deployment], counts: Mapping[str, float] | None, now_s: float
    ) -> dict[str, int]:
        """The target number of groups, by base. `counts` are requests under way by base; None: the gateways
        did not report, so only the bounds apply. A variant that waits to be served for the first time adds
        one."""
        self._now_s, self._silent = now_s, counts is None
        scaled = {d.model: d for d in deployments if d.model == d.base and _scales(d)}
        if counts is not None:
            waited_for = {d.base for d in deployments if d.model != d.base and _waits(d)}
            self._seen = {
                name: self._noted(deployment, counts.get(name, 0) + (name in waited_for))
                for name, deployment in scaled.items()
            }
        return {name: self.wanted(deployment) for name, deployment in scaled.items()}

    def _noted(self, deployment: Deployment, in_flight: float) -> autoscaling.History:
        seen, groups = self._seen.get(deployment.model), autoscaling.active(deployment)
        return autoscaling.noted(seen, in_flight, self._now_s, groups, _starts(deployment))

    def wanted(self, deployment: Deployment) -> int:
        """The target number of groups as of the last note."""
        current, history = autoscaling.active(deployment), self._seen.get(deployment.model)
        if not _scales(deployment):
            return current
        if history is None or self._silent:
            return autoscaling.bounded(deployment.scaling, current)
        at_once = known_sizes(deployment).requests_at_once or USUAL_REQUESTS
        target = deployment.scaling.target_in_flight or at_once
        return autoscaling.wanted(deployment.scaling, target, current, history, self._now_s)


def _starts(deployment: Deployment) -> bool:
    """Whether a group starts for the first time; a group that keeps failing is no reason to wait."""
    return any(g.phase is GroupPhase.STARTING and not g.failures for g in deployment.groups)


def _waits(variant: Deployment) -> bool:
    return not variant.established and variant.phase in (Phase.PENDING, Phase.DEPLOYING)


def _scales(deployment: Deployment) -> bool:
    """Whether a deployment scales; until it has served once, it keeps its first groups."""
    return deployment.established and deployment.phase is not Phase.DELETING
