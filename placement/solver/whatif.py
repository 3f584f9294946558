"""What-if: place requests one after the other on a cluster, without deploying anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from placement.solver.cluster import Cluster
from placement.solver.decide import decide
from placement.solver.default_estimator import estimator_of
from placement.solver.layout import after
from placement.solver.outcome import NotPlaced, Outcome
from placement.solver.policies.base import EstimatorFor, Policy
from placement.solver.request import Request
from placement.types import Placement

DecideOne = Callable[[Cluster, Request], Outcome]


@dataclass(frozen=True)
class WhatIf:
    """`outcomes` in the order of the requests, each with its request; `cluster` after all placements."""

    policy: str
    outcomes: tuple[tuple[Request, Outcome], ...]
    cluster: Cluster

    @property
    def placed(self) -> tuple[tuple[Request, Placement], ...]:
        return tuple((r, outcome) for r, outcome in self.outcomes if isinstance(outcome, Placement))

    @property
    def not_placed(self) -> tuple[NotPlaced, ...]:
        return tuple(outcome for _, outcome in self.outcomes if isinstance(outcome, NotPlaced))


def what_if(
    cluster: Cluster, requests: Sequence[Request], policy: Policy, estimator_for: EstimatorFor = estimator_of
) -> WhatIf:
    """As `in_order`, by a search with this policy."""
    return in_order(
        cluster, requests, policy.name, lambda now, request: decide(now, request, policy, estimator_for)
    )


def in_order(cluster: Cluster, requests: Sequence[Request], policy: str, decide_one: DecideOne) -> WhatIf:
    """Each request sees what earlier requests took; a request that does not fit takes nothing."""
    outcomes = []
    for request in requests:
        outcome = decide_one(cluster, request)
        if isinstance(outcome, Placement):
            cluster = after(cluster, request, outcome)
        outcomes.append((request, outcome))
    return WhatIf(policy, tuple(outcomes), cluster)
