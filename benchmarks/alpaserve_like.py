"""A greedy after AlpaServe: the cluster cut into equal groups of one shape, models onto the least busy group.

Every group size and shape is tried, and the one kept that holds most models, then the one of most
throughput. Stages are even, models uncompressed, one copy each. AlpaServe also simulates traces and swaps
models between groups; this does neither.
"""

from __future__ import annotations

from placement.solver.cluster import Cluster
from placement.solver.layout import Layout, Search, after, fits, placed
from placement.solver.plan import Shape
from placement.solver.request import Request
from placement.solver.roofline import Roofline
from placement.solver.shapes import tp_divides
from placement.solver.view import view_of
from placement.types import Placement
from profiler.plans import even_stages


def greedy(cluster: Cluster, requests: list[Request]) -> tuple[int, float]:
    """Models that fit and their requests per second, by the best group shape."""
    return max(_with_groups(cluster, requests, tp, pp) for tp, pp in group_shapes(cluster.gpu_count))


def group_shapes(total: int) -> list[tuple[int, int]]:
    """(TP, PP) of groups that `total` GPUs can be cut into."""
    sizes = [size for size in range(1, total + 1) if total % size == 0]
    return [(tp, size // tp) for size in sizes for tp in range(1, size + 1) if size % tp == 0]


def _with_groups(cluster: Cluster, requests: list[Request], tp: int, pp: int) -> tuple[int, float]:
    found = in_groups(cluster, requests, tp, pp)
    return len(found), sum(placed.choice.throughput_per_s for _, placed in found)


def in_groups(cluster: Cluster, requests: list[Request], tp: int, pp: int) -> list[tuple[Request, Placement]]:
    """Those that fit, one after the other, each on the least busy group of `tp` x `pp` GPUs."""
    made = []
    for request in requests:
        found = [
            f for start in range(0, cluster.gpu_count, tp * pp) if (f := _on(cluster, request, start, tp, pp))
        ]
        if found:
            _, best = min(found, key=lambda pair: pair[0])
            cluster = after(cluster, request, best)
            made.append((request, best))
    return made


def _on(
    cluster: Cluster, request: Request, start: int, tp: int, pp: int
) -> tuple[tuple[float, int], Placement] | None:
    """On the group that begins at GPU `start`; a model whose heads do not divide is cut into stages alone."""
    if not tp_divides(request.model, tp):
        tp, pp = 1, tp * pp
    view = view_of(cluster, request)
    gpus = range(start, start + tp * pp)
    groups = tuple(tuple(gpus[i : i + tp]) for i in range(0, tp * pp, tp))
    shape = Shape(request.model.compressions[0], tp, pp)
    layout = Layout(shape, groups, even_stages(request.model.layers, pp))
    estimator = Roofline(cluster, request)
    if not fits(view, estimator, layout):
        return None
    load = float(view.load[list(gpus)].mean())
    return (load, start), placed(request, view, layout, estimator, Search(1, 1))
