"""Small random clusters and requests, and an independent check of a placement against them."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

from placement.solver.cluster import Cluster, Gpu, GpuType, Link, Node, Resident
from placement.solver.plan import Shape
from placement.solver.request import Compression, ModelFigures, Request
from placement.solver.roofline import Roofline
from placement.types import Intent, Placement, Scope, Slos
from profiler.roofline import StageTime

GIB = 2**30
LINKS = (50e9, 25e9, 10e9)
TYPES = (GpuType("big", 2.0e12, 300e12), GpuType("small", 0.8e12, 150e12))


class Pausing(Roofline):
    """As measured on GPUs: a stage that several batches take turns on pauses between two."""

    PAUSE_S = 2e-3

    def token_time(self, shape: Shape, kind: GpuType, link: Link, sequences: float) -> StageTime:
        alone = super().token_time(shape, kind, link, sequences)
        return StageTime(alone.layer_s, alone.rest_s + self.PAUSE_S, self.PAUSE_S)


def model(
    layers: int = 32, heads: int = 32, kv_heads: int = 8, layer_bytes: int = 400 * 2**20
) -> ModelFigures:
    compressions = (
        Compression("none", 1.0, layer_bytes, 2 * kv_heads * 128 * 2),
        Compression("int4", 0.9, layer_bytes // 4, 2 * kv_heads * 128 * 2),
    )
    return ModelFigures(
        name=f"model-{layers}",
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        embedding_bytes=250 * 2**20,
        head_bytes=250 * 2**20,
        hidden_bytes=heads * 256,
        layer_flops=float(layer_bytes),
        overhead_bytes=GIB // 2,
        compressions=compressions,
        last_overhead_bytes=100 * 2**20,
    )


def random_cluster(rng: random.Random, most_gpus: int = 6) -> Cluster:
    nodes: list[Node] = []
    left = rng.randint(1, most_gpus)
    while left:
        size = rng.randint(1, min(4, left))
        kind = rng.choice(TYPES).name
        gpus = []
        for index in range(size):
            total = 48 * GIB if kind == "big" else 24 * GIB
            used = rng.choice((0, 0, rng.randint(0, total)))
            held = (Resident("other", 0, 1, used, rng.choice(("", "pair"))),) if used else ()
            load = rng.choice((0.0, 0.0, rng.random() * 0.9))
            gpus.append(Gpu(index, kind, total, total - used, load, index // 2, held))
        nodes.append(Node(f"n{len(nodes)}", tuple(gpus)))
        left -= size
    return Cluster(tuple(nodes), TYPES, LINKS)


def random_request(rng: random.Random) -> Request:
    heads, kv_heads = rng.choice(((32, 8), (32, 32), (9, 3), (16, 4)))
    return Request(
        name="new",
        model=model(rng.randint(8, 40), heads, kv_heads, rng.choice((100, 300, 500)) * 2**20),
        intent=rng.choice(tuple(Intent)),
        slos=Slos(accuracy=rng.choice((None, 0.95))),
        rate_per_s=rng.choice((0.0, 0.5, 2.0, 8.0)),
        input_tokens=rng.choice((64, 512)),
        output_tokens=rng.choice((32, 256)),
        concurrency=rng.choice((1, 8, 32)),
        max_tp=4,
        max_pp=4,
        headroom=rng.choice((0.0, 0.05)),
        group="pair",
        scope=rng.choice((Scope.NONE, Scope.NONE, Scope.GPU, Scope.NODE)),
    )


def compression_of(request: Request, placed: Placement) -> Compression:
    (compression,) = (c for c in request.model.compressions if c.name == placed.plan.quantization)
    return compression


def rank_bytes(request: Request, placed: Placement, stage: int) -> int:
    """A rank's memory, computed again from the definition, without the solver's functions."""
    figures, compression, plan = request.model, compression_of(request, placed), placed.plan
    tp, pp = plan.tensor_parallel, plan.pipeline_parallel
    tokens = request.concurrency * (request.input_tokens + request.output_tokens)
    copies = max(figures.kv_heads / tp, 1) / figures.kv_heads
    layer = -(-compression.layer_bytes // tp) + tokens * -(
        -int(compression.kv_bytes_per_token * copies * 1000) // 1000
    )
    need = placed.plan.layers_per_stage[stage] * layer + figures.overhead_bytes
    if stage == 0:
        need += -(-figures.embedding_bytes // tp)
    if stage == pp - 1:
        need += -(-figures.head_bytes // tp) + figures.last_overhead_bytes
    return need


def broken_rules(cluster: Cluster, request: Request, placed: Placement) -> list[str]:
    """Every rule that the placement breaks, in words."""
    gpus = {(node.name, gpu.index): gpu for node in cluster.nodes for gpu in node.gpus}
    plan, wrong = placed.plan, []
    tp, pp = plan.tensor_parallel, plan.pipeline_parallel
    used = Counter((seat.node, seat.device_index) for seat in placed.ranks)
    if max(used.values()) > 1 or len(placed.ranks) != tp * pp:
        wrong.append("each rank on a GPU of its own")
    stages = defaultdict(list)
    for seat in placed.ranks:
        stages[seat.stage].append(seat)
        gpu = gpus[seat.node, seat.device_index]
        need = rank_bytes(request, placed, seat.stage)
        if seat.memory_bytes < need or need > gpu.free_bytes - int(request.headroom * gpu.total_bytes):
            wrong.append(
                f"rank {seat.rank} needs {need}, is given {seat.memory_bytes}, {gpu.free_bytes} free"
            )
        mates = gpu.residents
        if request.scope is Scope.NODE:
            mates = tuple(r for (node, _), g in gpus.items() if node == seat.node for r in g.residents)
        if request.scope is not Scope.NONE and any(r.group == request.group for r in mates):
            wrong.append(f"rank {seat.rank} beside its own group")
    start = 0
    for stage in range(pp):
        seats = stages[stage]
        if (
            len({seat.node for seat in seats}) != 1
            or len({gpus[s.node, s.device_index].type for s in seats}) != 1
        ):
            wrong.append(f"stage {stage} is on one node and type")
        layers = placed.plan.layers_per_stage[stage]
        if layers < 1 or any((s.layer_start, s.layer_end) != (start, start + layers) for s in seats):
            wrong.append(f"stage {stage} holds layers from {start}")
        start += layers
    heads, kv = request.model.heads, request.model.kv_heads
    if start != request.model.layers or heads % tp or (kv % tp and tp % kv):
        wrong.append("all layers, heads divisible")
    if tp > request.max_tp or pp > request.max_pp:
        wrong.append("max TP and PP")
    if placed.estimate.accuracy < (request.slos.accuracy or 0):
        wrong.append("accuracy")
    if placed.choice.throughput_per_s < request.rate_per_s:
        wrong.append("rate")
    return wrong
