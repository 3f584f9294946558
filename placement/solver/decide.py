"""One decision: a policy's placement, or which constraint binds and what the nearest relaxations are.

A constraint binds when a placement exists without it.
"""

from __future__ import annotations

from dataclasses import replace

from placement.solver import hosts
from placement.solver.cluster import Cluster
from placement.solver.concessions import Find
from placement.solver.estimators import estimator_of
from placement.solver.memory import total_bytes
from placement.solver.objective import GIB
from placement.solver.outcome import NotPlaced, Outcome
from placement.solver.policies.base import EstimatorFor, Policy
from placement.solver.relaxing import relaxations, relaxed, together
from placement.solver.request import Request
from placement.solver.shapes import shapes
from placement.solver.view import view_of
from placement.types import Constraint, Placement, Relaxation


def decide(
    cluster: Cluster, request: Request, policy: Policy, estimator_for: EstimatorFor = estimator_of
) -> Outcome:
    """Never empty-handed: `NotPlaced` names a constraint and, where one exists, what would do."""

    def find(changed: Request) -> Placement | None:
        return policy.find(cluster, changed, estimator_for)

    return find(request) or _why_not(cluster, request, find, estimator_for)


def eased(
    cluster: Cluster,
    request: Request,
    refusal: NotPlaced,
    policy: Policy,
    estimator_for: EstimatorFor = estimator_of,
    max_factor: float | None = None,
) -> Placement | None:
    """What the nearest relaxation of a refusal allows, if it is by no more than a factor of `max_factor`.

    The placement says what gave way. An anti-affinity never does.
    """
    chosen, easier = _applicable(refusal, max_factor), request
    for relaxation in chosen:
        easier = relaxed(easier, relaxation, _gpus(cluster))
    placement = policy.find(cluster, easier, estimator_for) if chosen else None
    return placement and replace(placement, choice=replace(placement.choice, relaxed=chosen))


def _applicable(outcome: NotPlaced, max_factor: float | None) -> tuple[Relaxation, ...]:
    wanted = outcome.relaxations if outcome.together else outcome.relaxations[:1]
    fine = all(
        relaxation.constraint is not Constraint.ANTI_AFFINITY
        and (max_factor is None or relaxation.factor <= max_factor)
        for relaxation in wanted
    )
    return wanted if fine else ()


def _gpus(cluster: Cluster) -> int:
    """How many ranks could have a GPU each; CPU hosts carry any number, and gain nothing by more."""
    return 0 if any(kind.shared for kind in cluster.types) else cluster.gpu_count


def _why_not(cluster: Cluster, request: Request, find: Find, estimator_for: EstimatorFor) -> NotPlaced:
    gpus = _gpus(cluster)
    alone = relaxations(request, find, gpus)
    if alone:
        nearest = alone[0]
        reason = f"{nearest.constraint} binds: {nearest.text}"
        if nearest.constraint is Constraint.MEMORY:
            reason = _no_memory(cluster, request, estimator_for)
        return NotPlaced(request.name, nearest.constraint, reason, alone)
    all_limits = together(request, find, gpus)
    if all_limits:
        return NotPlaced(
            request.name,
            all_limits[0].constraint,
            "no limit alone is in the way, but all of them together: "
            + "; ".join(r.text for r in all_limits),
            all_limits,
            together=True,
        )
    return NotPlaced(request.name, Constraint.MEMORY, _no_memory(cluster, request, estimator_for))


def _no_memory(cluster: Cluster, request: Request, estimator_for: EstimatorFor) -> str:
    view = view_of(cluster, request)
    device = "CPU host" if view.shared else "GPU"
    if not len(view):
        return f"the cluster has no {device} for it; add one"
    estimator, layers = estimator_for(cluster, request), request.model.layers
    every = shapes(request, hosts.max_ranks(request) if view.shared else len(view))
    if not every:
        return f"{request.model.heads} heads cannot be split as asked on {len(view)} {device}s"
    need = min(total_bytes(estimator, shape, layers) for shape in every)
    free, largest = sum(view.usable.tolist()), max(view.usable.tolist())
    return (
        f"memory: the smallest plan needs {need / GIB:.2f} GiB over all ranks; {max(0, free) / GIB:.2f} GiB "
        f"are free on {len(view)} {device}s, {max(0, largest) / GIB:.2f} GiB at most on one"
    )
