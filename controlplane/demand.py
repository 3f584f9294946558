"""What the gateways say of the requests under way, remembered for as long as scaling looks back.

It is in no record: a controller that was restarted looks for a while before it changes anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from controlplane import scaling
from controlplane.records import Deployment, Phase


class DemandBook:
    """The last requests of each base, and how many groups its deployment should have by them."""

    def __init__(self, target: float) -> None:
        """`target` requests under way are enough for a group whose deployment does not say."""
        self._target = target
        self._seen: dict[str, scaling.History] = {}
        self._now_s = 0.0

    def note(
        self, deployments: Iterable[Deployment], counts: Mapping[str, float] | None, now_s: float
    ) -> dict[str, int]:
        """What should be, by base. `counts` are requests under way by base; None: the gateways did not say,
        and nothing is to change."""
        self._now_s = now_s
        scaled = {d.model: d for d in deployments if d.model == d.host and _scales(d)}
        if counts is None:
            return {}
        self._seen = {
            name: scaling.noted(self._seen.get(name), counts.get(name, 0), now_s) for name in scaled
        }
        return {name: self.wanted(deployment) for name, deployment in scaled.items()}

    def wanted(self, deployment: Deployment) -> int:
        """As of the last note."""
        current, history = scaling.active(deployment), self._seen.get(deployment.model)
        if history is None or not _scales(deployment):
            return current
        target = deployment.scaling.target_in_flight or self._target
        return scaling.wanted(deployment.scaling, target, current, history, self._now_s)


def _scales(deployment: Deployment) -> bool:
    """Until it has served once, a deployment has the groups that it began with."""
    return deployment.established and deployment.phase is not Phase.DELETING
