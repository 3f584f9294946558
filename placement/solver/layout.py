"""Stages on groups of GPUs, and the resulting plan, places and cluster."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from placement.solver.cluster import Cluster, Gpu, Link, Resident, utilisation_of, with_gpus
from placement.solver.memory import stage_bytes
from placement.solver.objective import objective, unit
from placement.solver.plan import CandidatePlan, Estimator, Figures, Shape, Stage
from placement.solver.request import Request
from placement.solver.view import View, busier
from placement.types import Choice, Placement, RankPlacement, Scope
from profiler.types import Estimate, Interval


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
    columns = list(gpus)
    if len(set(view.node[columns].tolist())) > 1:
        return Link.NETWORK
    return Link.FAST if len(set(view.nvlink_domain[columns].tolist())) == 1 else Link.NODE


def needs(estimator: Estimator, layout: Layout) -> dict[int, int]:
    """Bytes on each GPU of the view."""
    needed: dict[int, int] = {}
    for group, need in zip(layout.groups, stage_bytes(estimator, layout.shape, layout.layers), strict=True):
        for gpu in group:
            needed[gpu] = needed.get(gpu, 0) + need
    return needed


def fits(view: View, estimator: Estimator, layout: Layout) -> bool:
    """Whether all ranks fit into the usable memory of their GPUs."""
    return all(int(view.usable[gpu]) >= need for gpu, need in needs(estimator, layout).items())


@dataclass(frozen=True)
class Search:
    """The numbers of shapes and of layouts within every limit, from which a layout was chosen."""

    shapes: int
    alternatives: int
    reasons: tuple[str, ...] = ()


def placed(request: Request, view: View, layout: Layout, estimator: Estimator, search: Search) -> Placement:
    candidate = plan_of(view, layout)
    figures, account = estimator(candidate), estimator.account(candidate)
    ranks = _ranks(view, layout, figures)
    choice = Choice(
        objective=objective(request, layout.shape, figures),
        unit=unit(request),
        latency_s=figures.latency_s,
        throughput_per_s=figures.throughput_per_s,
        utilisation=figures.utilisation,
        shapes=search.shapes,
        alternatives=search.alternatives,
        ttft=_interval(figures.ttft_s, account.ttft_share),
        tpot=_interval(figures.tpot_s, account.tpot_share),
        reasons=search.reasons,
        notes=account.notes,
        input_tokens=request.input_tokens,
        output_tokens=request.output_tokens,
    )
    estimate = Estimate(
        figures.ttft_s,
        figures.tpot_s,
        tuple(rank.memory_bytes for rank in ranks),
        layout.shape.compression.accuracy,
        account.basis,
    )
    return Placement(account.plan, ranks, estimate, "", choice)


def _interval(value: float, share: tuple[float, float]) -> Interval:
    low, high = share
    return Interval(value, value * low, value * high)


def after(cluster: Cluster, request: Request, outcome: Placement) -> Cluster:
    """The cluster after this deployment: less free memory, and a load raised by the expected rate."""
    gpus = {(node.name, gpu.index): gpu for node in cluster.nodes for gpu in node.gpus}
    held: dict[tuple[str, int], list[Resident]] = {}
    for seat in outcome.ranks:
        at = seat.node, seat.device_index
        held.setdefault(at, []).append(resident(request.name, seat, outcome, request.group, request.scope))
    return with_gpus(cluster, {at: _with(gpus[at], ranks) for at, ranks in held.items()})


def resident(deployment: str, rank: RankPlacement, placed: Placement, group: str, scope: Scope) -> Resident:
    """A rank of a placement, for its device. Older placements do not have a utilisation: 0."""
    busy = dict(enumerate(placed.choice.utilisation)).get(rank.stage, 0.0)
    return Resident(
        deployment, rank.layer_start, rank.layer_end, rank.memory_bytes, group, scope, utilisation=busy
    )


def _with(gpu: Gpu, ranks: list[Resident]) -> Gpu:
    """The GPU with the ranks of one more deployment."""
    return replace(
        gpu,
        free_bytes=gpu.free_bytes - sum(rank.memory_bytes for rank in ranks),
        load=busier(gpu.load, utilisation_of(ranks)),
        residents=(*gpu.residents, *ranks),
    )


def _ranks(view: View, layout: Layout, figures: Figures) -> tuple[RankPlacement, ...]:
    ranks, start = [], 0
    for stage, (group, layers) in enumerate(zip(layout.groups, layout.layers, strict=True)):
        for tp_rank, gpu in enumerate(group):
            node, index = view.names[gpu]
            kind = view.types[int(view.type[gpu])]
            ranks.append(
                RankPlacement(
                    rank=stage * layout.shape.tp + tp_rank,
                    stage=stage,
                    tp_rank=tp_rank,
                    node=node,
                    device_index=index,
                    device_kind=kind.kind or kind.name,
                    layer_start=start,
                    layer_end=start + layers,
                    memory_bytes=figures.memory_bytes[stage],
                )
            )
        start += layers
    return tuple(ranks)
