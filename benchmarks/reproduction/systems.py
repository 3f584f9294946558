"""Who deploys: ours, MaverIQ's, and two systems like those that it compares itself with.

- `ostinato`, `maveriq`: the product's policies, one model after the other. Both know the mean rate, and what
  the models before take; MaverIQ itself sees how busy GPUs are instead.
- `accelerate-like`: every model over all GPUs, uncompressed, with as much TP as its heads allow. What has no
  room is read from the host's memory in each step, the same share of every model.
- `alpaserve-like`: the server cut into equal groups, each model on the least busy one, uncompressed, even
  stages; every cut is simulated with the whole trace and the one kept that keeps most SLOs (five times the
  latency alone). It may leave models out where that keeps more; `alpaserve-like-all` may not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.alpaserve_like import group_shapes, in_groups
from benchmarks.reproduction.site import Site
from benchmarks.reproduction.step_models import Deployed, of_placement
from placement.solver.cluster import Cluster
from placement.solver.layout import Layout, after
from placement.solver.plan import Shape
from placement.solver.policies.base import Policy
from placement.solver.policies.joint import Joint
from placement.solver.policies.maveriq import Maveriq
from placement.solver.request import Request
from placement.solver.shapes import tp_divides
from placement.types import Placement
from profiler.plans import even_stages

HOST_BYTES_PER_S = 25e9  # PCIe 4, each GPU

Placed = list[tuple[int, Deployed]]  # the model's number, and its copy
Judge = Callable[[Placed], float]
POLICIES: dict[str, Policy] = {"ostinato": Joint(), "maveriq": Maveriq()}


def by_policy(site: Site, requests: Sequence[Request], policy: Policy) -> Placed:
    """In order; who fits nowhere is left out."""
    cluster, made = site.idle, []
    for number, request in enumerate(requests):
        expects, found = _find(site, cluster, request, policy)
        if found is not None:
            cluster = after(cluster, expects, found)
            made.append((number, of_placement(request, found)))
    return made


def _find(site: Site, cluster: Cluster, request: Request, policy: Policy) -> tuple[Request, Placement | None]:
    """Where no place keeps up with the rate, one for a half of it will do, and so on."""
    for share in (1.0, 0.5, 0.25, 0.125, 0.0):
        expects = replace(request, rate_per_s=share * request.rate_per_s)
        found = policy.find(cluster, expects, site.estimator_for)
        if found is not None:
            return expects, found
    return request, None


def accelerate_like(site: Site, requests: Sequence[Request]) -> Placed:
    total = site.idle.gpu_count
    made = [(number, _over_all(request, total)) for number, request in enumerate(requests)]
    room = sum(gpu.free_bytes for gpu in site.idle.nodes[0].gpus)
    held = sum(one.memory_bytes(site) for _, one in made)
    weights = sum(one.request.model.layers * one.layout.shape.compression.layer_bytes for _, one in made)
    streamed = min(1.0, max(0.0, held - room) / weights)
    return [
        (number, replace(one, streamed=streamed, stream_bytes_per_s=HOST_BYTES_PER_S)) for number, one in made
    ]


def _over_all(request: Request, gpus: int) -> Deployed:
    model = request.model
    tp = max(tp for tp in range(1, gpus + 1) if gpus % tp == 0 and tp_divides(model, tp))
    pp = gpus // tp
    groups = tuple(tuple(range(n * tp, (n + 1) * tp)) for n in range(pp))
    return Deployed(
        request, Layout(Shape(model.compressions[0], tp, pp), groups, even_stages(model.layers, pp))
    )


def alpaserve_like(site: Site, requests: Sequence[Request], judge: Judge) -> Placed:
    """`judge`: the share of SLOs that a deployment keeps. Of the cuts that hold most models, the best."""
    cuts = _cuts(site.idle, requests)
    most = max(map(len, cuts))
    return max((cut for cut in cuts if len(cut) == most), key=judge)


def with_fewer(site: Site, requests: Sequence[Request], judge: Judge) -> Placed:
    """Of all cuts the best; then one model less as long as that keeps more."""
    best = max(_cuts(site.idle, requests), key=judge)
    kept = judge(best)
    while len(best) > 1:
        without = max(([one for one in best if one is not left] for left in best), key=judge)
        if judge(without) <= kept:
            break
        kept, best = judge(without), without
    return best


def _cuts(idle: Cluster, requests: Sequence[Request]) -> list[Placed]:
    made = []
    for tp, pp in group_shapes(idle.gpu_count):
        numbers = {request.name: number for number, request in enumerate(requests)}
        found = in_groups(idle, list(requests), tp, pp)
        if found:
            made.append([(numbers[request.name], of_placement(request, placed)) for request, placed in found])
    return made
