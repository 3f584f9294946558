"""Stages on groups of GPUs, and the plan, the seats and the cluster that follow from them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from placement.solver.cluster import Cluster, Gpu, Link, Resident, with_gpus
from placement.solver.memory import stage_bytes
from placement.solver.objective import objective, unit
from placement.solver.outcome import Placed, RankSeat
from placement.solver.plan import CandidatePlan, Estimator, Figures, Shape, Stage
from placement.solver.request import Request
from placement.solver.view import View, slowdown_of

BUSIEST = 1.0


@dataclass(frozen=True)
class Layout:
    """`groups` are indices into a view: the GPUs of each stage, in order."""

    shape: Shape
    groups: tuple[tuple[int, ...], ...]
    layers: tuple[int, ...]


def plan_of(view: View, layout: Layout) -> CandidatePlan:
    stages = tuple(
        Stage(
            layers=layers,
            gpu_type=view.type_names[int(view.type[group[0]])],
            link=widest_link(view, group),
            slowdown=float(view.slowdown[list(group)].max()),
        )
        for group, layers in zip(layout.groups, layout.layers, strict=True)
    )
    hops = tuple(widest_link(view, (*a, *b)) for a, b in itertools.pairwise(layout.groups))
    return CandidatePlan(layout.shape, stages, hops)


def widest_link(view: View, gpus: tuple[int, ...]) -> Link:
    """The slowest link among these GPUs."""
    if len({int(view.node[gpu]) for gpu in gpus}) > 1:
        return Link.NETWORK
    return Link.FAST if len({int(view.island[gpu]) for gpu in gpus}) == 1 else Link.NODE


def fits(view: View, request: Request, layout: Layout) -> bool:
    """Whether every rank fits what its GPU may give."""
    needs = stage_bytes(request, layout.shape, layout.layers)
    return all(
        int(view.usable[gpu]) >= need
        for group, need in zip(layout.groups, needs, strict=True)
        for gpu in group
    )


def placed(
    request: Request, view: View, layout: Layout, estimator: Estimator, reasons: tuple[str, ...]
) -> Placed:
    figures = estimator(plan_of(view, layout))
    return Placed(
        deployment=request.name,
        shape=layout.shape,
        layers_per_stage=layout.layers,
        ranks=_seats(view, layout, figures),
        figures=figures,
        objective=objective(request, layout.shape, figures.latency_s),
        unit=unit(request),
        reasons=reasons,
    )


def after(cluster: Cluster, request: Request, outcome: Placed) -> Cluster:
    """The cluster once this is deployed: less free, and busier by the expected rate."""
    gpus = {(node.name, gpu.index): gpu for node in cluster.nodes for gpu in node.gpus}
    changed: dict[tuple[str, int], Gpu] = {}
    for seat in outcome.ranks:
        gpu = gpus[seat.node, seat.gpu]
        held = Resident(request.name, seat.layer_start, seat.layer_end, seat.memory_bytes, request.group)
        # The time that others leave is what this takes its share of: utilisation counts their slowdown.
        busy = outcome.figures.utilisation[seat.stage] / slowdown_of(gpu.load)
        changed[seat.node, seat.gpu] = replace(
            gpu,
            free_bytes=gpu.free_bytes - seat.memory_bytes,
            load=min(BUSIEST, gpu.load + busy),
            residents=(*gpu.residents, held),
        )
    return with_gpus(cluster, changed)


def _seats(view: View, layout: Layout, figures: Figures) -> tuple[RankSeat, ...]:
    seats, start = [], 0
    for stage, (group, layers) in enumerate(zip(layout.groups, layout.layers, strict=True)):
        for tp_rank, gpu in enumerate(group):
            node, index = view.names[gpu]
            seats.append(
                RankSeat(
                    rank=stage * layout.shape.tp + tp_rank,
                    stage=stage,
                    tp_rank=tp_rank,
                    node=node,
                    gpu=index,
                    layer_start=start,
                    layer_end=start + layers,
                    memory_bytes=figures.memory_bytes[stage],
                )
            )
        start += layers
    return tuple(seats)
