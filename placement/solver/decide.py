"""One decision: a policy's placement, or the binding constraint and the nearest relaxations.

A constraint binds if a placement exists without it.
"""

from __future__ import annotations

from dataclasses import replace

from placement.solver import hosts
from placement.solver.able import AbleDevices
from placement.solver.cluster import Cluster
from placement.solver.concessions import any_shape, ungrouped
from placement.solver.default_estimator import estimator_of
from placement.solver.memory import total_bytes
from placement.solver.objective import GIB
from placement.solver.outcome import NotPlaced, Outcome
from placement.solver.places import Shared
from placement.solver.policies.base import EstimatorFor, Policy
from placement.solver.relaxing import relaxations, relaxed, together
from placement.solver.request import Request
from placement.solver.shapes import shapes
from placement.types import Constraint, Placement, Relaxation


def decide(
    cluster: Cluster, request: Request, policy: Policy, estimator_for: EstimatorFor = estimator_of
) -> Outcome:
    """Decide. `NotPlaced` always names a constraint and, if one exists, a sufficient relaxation."""

    able = AbleDevices(cluster, policy, estimator_for)
    return able.search(request) or _why_not(able, request, _gpus(cluster))


def eased(
    cluster: Cluster,
    request: Request,
    refusal: NotPlaced,
    policy: Policy,
    estimator_for: EstimatorFor = estimator_of,
    max_factor: float | None = None,
) -> Placement | None:
    """The placement with a refusal's nearest relaxation, if its factor is at most `max_factor`.

    The placement names what was relaxed. An anti-affinity is never relaxed.
    """
    chosen, easier = _applicable(refusal, max_factor), request
    for relaxation in chosen:
        easier = relaxed(easier, relaxation, _gpus(cluster))
    placement = AbleDevices(cluster, policy, estimator_for).search(easier) if chosen else None
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
    """How many ranks could have their own GPU; 0 for CPU hosts, which hold any number of ranks."""
    return 0 if any(kind.shared for kind in cluster.types) else cluster.gpu_count


def _why_not(able: AbleDevices, request: Request, gpus: int) -> NotPlaced:
    parts = [*able.parts(request)]
    if not parts:
        reason = f"{able.problem(request)}; allow a compression that these GPUs can run, such as none"
        return NotPlaced(request.name, Constraint.COMPRESSION, reason)
    if not any(_may_hold(shared, asked, gpus) for shared, asked in parts):
        return NotPlaced(request.name, Constraint.MEMORY, _no_memory(*parts[0]))
    find, fits = able.search, able.fits
    alone = relaxations(request, find, gpus, fits)
    if alone:
        nearest = alone[0]
        reason = f"no plan meets the limits, because of {nearest.constraint}: {nearest.text}"
        if nearest.constraint is Constraint.MEMORY:
            reason = _no_memory(*parts[0])
        return NotPlaced(request.name, nearest.constraint, reason, alone)
    all_limits = together(request, find, gpus, fits)
    if all_limits:
        return NotPlaced(
            request.name,
            all_limits[0].constraint,
            "no plan meets all limits together: " + "; ".join(r.text for r in all_limits),
            all_limits,
            together=True,
        )
    return NotPlaced(request.name, Constraint.MEMORY, _no_memory(*parts[0]))


def _may_hold(shared: Shared, request: Request, gpus: int) -> bool:
    """Whether there is memory for one sequence of the model, if everything else is given up. If not, no
    search finds anything."""
    free = replace(ungrouped(any_shape(request, gpus)), concurrency=1, headroom=0.0)
    places, estimator = shared.places(free), shared.estimator(free)
    if places.view.shared:
        return True
    widest_first = reversed(shapes(free, len(places.view)))
    return any(places.holds(shape, request.model.layers, estimator) for shape in widest_first)


def _no_memory(shared: Shared, request: Request) -> str:
    view = shared.view(request)
    device = "CPU host" if view.shared else "GPU"
    if not len(view):
        return f"the cluster has no {device}; add a {device}"
    estimator, layers = shared.estimator(request), request.model.layers
    every = shapes(request, hosts.max_ranks(request) if view.shared else len(view))
    if not every:
        return f"the allowed parallelism cannot split {request.model.heads} heads over {len(view)} {device}s"
    need = min(total_bytes(estimator, shape, layers) for shape in every)
    free, largest = sum(view.usable.tolist()), max(view.usable.tolist())
    return (
        f"memory: the smallest plan needs {need / GIB:.2f} GiB over all ranks, and {max(0, free) / GIB:.2f} "
        f"GiB are free on {len(view)} {device}s (at most {max(0, largest) / GIB:.2f} GiB on one); `ostinato "
        f"cluster` shows the models that hold memory: undeploy one, or add a {device}"
    )
