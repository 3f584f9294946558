"""Every placement of a small instance: all shapes, all ordered choices of GPUs, all splits of the layers.

This sums a placement's time again, from the times of single stages, and computes memory from its definition.
It uses only the solver's list of shapes and the estimator's times of a stage.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.solver.cluster import Cluster, Gpu, Link, Node
from placement.solver.plan import Estimator, Shape
from placement.solver.request import Compression, ModelFigures, Request
from placement.solver.shapes import shapes
from placement.solver.view import View, view_of
from placement.types import CostMeasure, Intent, Scope, Slos
from testkit.solver_instances import GIB, LINKS, TYPES, random_request

Rows = NDArray[Any]
MIB = 2**20


@dataclass(frozen=True)
class Stages:
    """Ordered groups of GPUs: what a layer takes on each, and what each can hold."""

    prefill: Rows
    decode: Rows
    work: Rows
    rests: tuple[float, float]
    gaps: Rows
    beside: Rows
    hops: tuple[float, float]
    room: Rows


def best(cluster: Cluster, request: Request, estimator: Estimator) -> float | None:
    """The least objective of all placements within every limit; None when there is none."""
    view = view_of(cluster, request)
    found = [
        value
        for shape in shapes(request, len(view))
        if shape.compression.accuracy >= (request.slos.accuracy or 0)
        for stages in every_choice(view, shape, estimator)
        for value in [least(request, shape, estimator, stages)]
        if value is not None
    ]
    return min(found, default=None)


def every_choice(view: View, shape: Shape, estimator: Estimator) -> Iterator[Stages]:
    """Each ordered choice of disjoint groups, of `shape.tp` GPUs of one node and type."""
    alike = [
        gpus
        for gpus in itertools.combinations(range(len(view)), shape.tp)
        if len({(int(view.node[g]), int(view.type[g])) for g in gpus}) == 1
    ]
    for chosen in itertools.permutations(alike, shape.pp):
        if len(set(itertools.chain(*chosen))) == shape.ranks:
            yield stages_of(view, shape, estimator, chosen)


def link_of(view: View, gpus: tuple[int, ...]) -> Link:
    if len({int(view.node[g]) for g in gpus}) > 1:
        return Link.NETWORK
    return Link.NODE if len({int(view.nvlink_domain[g]) for g in gpus}) > 1 else Link.FAST


def stages_of(view: View, shape: Shape, estimator: Estimator, chosen: tuple[tuple[int, ...], ...]) -> Stages:
    rates = [estimator.rates(shape, view.types[int(view.type[g[0]])].name, link_of(view, g)) for g in chosen]
    slower = np.array([max(1 / (1 - min(float(view.load[gpu]), 0.95)) for gpu in g) for g in chosen])
    hops = [estimator.hop_s(shape, link_of(view, a + b)) for a, b in itertools.pairwise(chosen)]
    last, is_last = rates[-1], np.arange(shape.pp) == shape.pp - 1
    beside = np.where(is_last, last.work_rest_s, [r.work_gap_s for r in rates])
    return Stages(
        prefill=slower * [r.prefill_layer_s for r in rates],
        decode=slower * [r.decode_layer_s for r in rates],
        work=slower * [r.work_layer_s for r in rates],
        rests=(slower[-1] * last.prefill_rest_s, slower[-1] * last.decode_rest_s),
        gaps=slower * np.where(is_last, 0.0, [r.decode_gap_s for r in rates]),
        beside=slower * beside,
        hops=(sum(h.prompt for h in hops), sum(h.token for h in hops)),
        room=np.array([min(int(view.usable[gpu]) for gpu in g) for g in chosen]),
    )


def compositions(layers: int, stages: int) -> Rows:
    """(splits, stages): every way to give each stage at least one layer."""
    cuts = itertools.combinations(range(1, layers), stages - 1)
    return np.array([np.diff((0, *cut, layers)) for cut in cuts])


def least(request: Request, shape: Shape, estimator: Estimator, stages: Stages) -> float | None:
    """The least objective of one ordered choice over all splits."""
    splits = np.array([request.layers]) if request.layers else compositions(request.model.layers, shape.pp)
    beside, each = memory(request, shape)
    taken = splits * each + beside
    splits, taken = (rows[(taken <= stages.room).all(axis=1)] for rows in (splits, taken))
    if not len(splits):
        return None
    decode = splits * stages.decode
    decode[:, -1] += stages.rests[1]
    ttft = (splits * stages.prefill).sum(axis=1) + stages.rests[0] + stages.hops[0]
    in_turn = np.maximum(
        estimator.groups(shape) * (decode + stages.gaps).max(axis=1), estimator.turns_s(shape)
    )
    tpot = np.maximum(decode.sum(axis=1) + stages.hops[1], in_turn)
    latency = ttft + tpot * (request.output_tokens - 1)
    rate = 1 / (splits * stages.work + stages.beside).max(axis=1)
    gib = shape.tp * taken.sum(axis=1) / GIB
    costs = {
        CostMeasure.MEMORY: gib,
        CostMeasure.GPU_HOURS: shape.ranks * latency / 3600,
        CostMeasure.MEMORY_LATENCY: gib * latency,
    }
    goals = {
        Intent.MIN_LATENCY: latency,
        Intent.MIN_MEMORY: gib,
        Intent.MIN_GPU_HOURS: costs[CostMeasure.GPU_HOURS],
    }
    limits = request.slos
    within = rate >= request.rate_per_s
    for limit, value in (
        (limits.latency_s, latency),
        (limits.ttft_s, ttft),
        (limits.tpot_s, tpot),
        (limits.cost, costs[request.cost]),
    ):
        within &= value <= (np.inf if limit is None else limit)
    goal = goals.get(request.intent, costs[request.cost])[within]
    return float(goal.min()) if len(goal) else None


def memory(request: Request, shape: Shape) -> tuple[Rows, int]:
    """Bytes of a rank of each stage without its layers, and of each layer."""
    figures, tp = request.model, shape.tp
    heads = max(1, figures.kv_heads // tp)
    cached = -(-shape.compression.kv_bytes_per_token * heads // figures.kv_heads)
    each = -(-shape.compression.layer_bytes // tp) + request.kv_tokens * cached
    embedding, head = -(-figures.embedding_bytes // tp), -(-figures.head_bytes // tp)
    beside = np.full(shape.pp, figures.overhead_bytes)
    beside[0] += embedding
    beside[-1] += figures.last_overhead_bytes
    if not figures.tied:
        beside[-1] += head
    elif shape.pp > 1:
        beside[-1] += embedding
    return beside, each


def instance(rng: random.Random) -> tuple[Cluster, Request]:
    """Two to five GPUs, little of them free, and a model that just fits or just does not."""
    nodes: list[Node] = []
    left = rng.randint(2, 5)
    layer_bytes = rng.choice((100, 200, 400)) * MIB
    while left:
        size = rng.randint(1, left)
        kind = rng.choice(TYPES).name
        total = (48 if kind == "big" else 24) * GIB
        gpus = []
        for index in range(size):
            free = int(rng.choice((rng.uniform(0.5, 3), rng.uniform(1, 10))) * GIB)
            load = rng.choice((0.0, 0.0, rng.random()))
            gpus.append(Gpu(index, kind, total, free, load, rng.randint(0, 1)))
        nodes.append(Node(f"n{len(nodes)}", tuple(gpus)))
        left -= size
    cluster = Cluster(tuple(nodes), TYPES, LINKS)
    heads, kv_heads = rng.choice(((32, 8), (9, 3), (16, 4)))
    compressions = (
        Compression("none", 1.0, layer_bytes, 2 * kv_heads * 128 * 2),
        Compression("int4", 0.9, layer_bytes // 4, 2 * kv_heads * 128 * 2),
    )
    figures = ModelFigures(
        name="model",
        layers=rng.randint(4, 16),
        heads=heads,
        kv_heads=kv_heads,
        embedding_bytes=rng.choice((0, 300, 1200)) * MIB,
        head_bytes=rng.choice((0, 300, 1200)) * MIB,
        hidden_bytes=heads * 256,
        layer_flops=float(layer_bytes),
        overhead_bytes=300 * MIB,
        compressions=compressions[: rng.randint(1, 2)],
        tied=rng.random() < 0.5,
        last_overhead_bytes=rng.choice((0, 100)) * MIB,
    )
    request = replace(
        random_request(rng),
        model=figures,
        group="",
        scope=Scope.NONE,
        concurrency=rng.choice((1, 4)),
        max_pp=5,
        slos=Slos(accuracy=rng.choice((None, 0.95))),
    )
    return cluster, request
