"""A simulated machine that writes tables in the artifact's schema: the reference for tests of estimators.

It is built from operations, not from the estimators' own laws. Every matrix multiplication of a layer takes
the longer of its bytes and its FLOPs, plus a launch. Every generated token reads the whole present cache.
All-reduces are of hidden-size messages over NVLink pairs or PCIe. Memory is allocated in pages. Stages may
have a least time, hidden by full models, or wait for each other. Runs and engines differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from controlplane.baselines.estimators.tables import GIB, Measurement, Table
from controlplane.baselines.estimators.types import Family, Query

MIB = 2**20
BITS = {"float16": 16, "int8": 8, "int4": 4, "int4_gptq": 4.5}


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    gated: bool = True

    @property
    def matrices(self) -> list[tuple[int, int, bool]]:
        """(in, out, followed by an all-reduce) of one layer."""
        kv = self.hidden // self.heads * self.kv_heads
        up = (2 if self.gated else 1) * self.inner
        qkv = (self.hidden, self.hidden + 2 * kv, False)
        return [qkv, (self.hidden, self.hidden, True), (self.hidden, up, False),
                (self.inner, self.hidden, True)]  # fmt: skip


SHAPES = {
    "falcon-7b": Shape(32, 4544, 71, 1, 18176, 65024, gated=False),
    "falcon-40b": Shape(60, 8192, 128, 8, 32768, 65024, gated=False),
    "gptj-6b": Shape(28, 4096, 16, 16, 16384, 50400, gated=False),
    "llama-2-7b": Shape(32, 4096, 32, 32, 11008, 32000),
    "llama-2-13b": Shape(40, 5120, 40, 40, 13824, 32000),
    "llama-2-70b": Shape(80, 8192, 64, 8, 28672, 32000),
}


@dataclass(frozen=True)
class Machine:
    """A machine: sustained rates in bytes/s and FLOP/s; times in s."""

    bandwidth: float = 768e9 * 0.86
    flops: float = 155e12 * 0.55
    launch_s: float = 4e-6
    step_s: float = 1.2e-3  # the host's work per generated token
    setup_s: float = 6e-3  # the host's work per batch, before the prompt
    per_sequence_s: float = 6e-6  # sampling
    prepare_s: float = 30e-6  # a rank's host for each of its layers, before each pass; ranks do it at once
    pair_bytes_per_s: float = 45e9
    pair_latency_s: float = 12e-6
    bus_bytes_per_s: float = 14e9
    bus_latency_s: float = 22e-6
    hop_s: float = 0.1e-3
    # In a pipeline: a stage's least time a pass, its spread over families, and if only the first stage has
    # one; the share by which shorter stages wait for the longest.
    stage_floor_s: float = 0.0
    floor_spread: float = 0.0
    first_only: bool = False
    wait: float = 0.0
    gpu_bytes: float = 48e9
    context_bytes: float = 450 * MIB
    # Share of the bandwidth that a kernel for these weights reaches, alone and for more than four rows.
    single: tuple[tuple[str, float], ...] = (("int8", 0.88), ("int4", 0.62), ("int4_gptq", 0.72))
    many: tuple[tuple[str, float], ...] = (("int8", 0.84), ("int4", 0.58), ("int4_gptq", 0.66))


A6000 = Machine()
H100 = Machine(
    bandwidth=3.35e12 * 0.85, flops=990e12 * 0.5, launch_s=2e-6, step_s=0.3e-3, pair_bytes_per_s=350e9,
    bus_bytes_per_s=350e9, pair_latency_s=8e-6, bus_latency_s=10e-6, hop_s=0.05e-3, gpu_bytes=80e9,
)  # fmt: skip
PCIE_ONLY = Machine(pair_bytes_per_s=10e9, pair_latency_s=25e-6, bus_bytes_per_s=8e9, bus_latency_s=35e-6)
SLOW_COMPUTE = Machine(flops=60e12 * 0.6, step_s=3e-3, hop_s=0.25e-3)
# Hosts that take longer for a stage than one layer takes: full models hide this, fingerprints show it.
SLOW_HOST = Machine(stage_floor_s=0.7e-3)
UNLIKE_HOSTS = Machine(stage_floor_s=0.8e-3, floor_spread=0.3)
SLOW_FIRST_STAGE = Machine(stage_floor_s=2e-3, first_only=True)
WAITING = Machine(wait=0.5)
SLOW_HOPS = Machine(hop_s=1e-3)


def latency_s(machine: Machine, shape: Shape, query: Query, prompt_tokens: int) -> float:
    """The time of the prompt, then of one step per token after the first."""
    prompt = machine.setup_s + _pass_s(machine, shape, query, prompt_tokens)
    prompt += query.layers * _attention_s(machine, shape, query, prompt_tokens, 0)
    steps = range(1, query.output_tokens)
    attention = sum(_attention_s(machine, shape, query, 1, prompt_tokens + done) for done in steps)
    return prompt + len(steps) * _pass_s(machine, shape, query, 1) + query.layers * attention


def _pass_s(machine: Machine, shape: Shape, query: Query, new: int) -> float:
    """The time of all work except attention: `new` tokens of each sequence through all stages."""
    rows, tp = query.batch * new, query.tensor_parallel
    layer = sum(
        _matmul_s(machine, query.family.dtype, rows, m / tp, n)
        + (_allreduce_s(machine, tp, rows * shape.hidden * 2) if reduced else 0.0)
        for m, n, reduced in shape.matrices
    )
    head = _matmul_s(machine, "float16", query.batch, shape.hidden / tp, shape.vocab)
    hop = machine.hop_s + rows * shape.hidden * 2 / machine.bus_bytes_per_s
    host = machine.step_s + query.batch * machine.per_sequence_s
    host += machine.prepare_s * max(query.layers_per_stage)
    stages = _stages_s(machine, query, layer) if query.pipeline_parallel > 1 else 0.0
    return query.layers * layer + stages + head + host + (query.pipeline_parallel - 1) * hop


def _stages_s(machine: Machine, query: Query, layer: float) -> float:
    """The time of a pipeline's stages in addition to their layers of `layer` seconds."""
    stages = [layers * layer for layers in query.layers_per_stage]
    luck = np.random.default_rng(list(str(query.family).encode())).normal()
    floor = machine.stage_floor_s * math.exp(machine.floor_spread * luck)
    short = sum(max(0.0, floor - stage) for stage in (stages[:1] if machine.first_only else stages))
    return short + machine.wait * (len(stages) * max(stages) - sum(stages))


def _attention_s(machine: Machine, shape: Shape, query: Query, new: int, cached: int) -> float:
    """The time of one layer's attention: the longer of reading the cache and computing, and its launches."""
    tp = query.tensor_parallel
    kv_bytes = 2 * shape.hidden / shape.heads * shape.kv_heads * (1 if query.family.int8_kv else 2) / tp
    read = query.batch * (cached + new) * kv_bytes / (0.7 * machine.bandwidth)
    pairs = query.batch * new * (cached + (new + 1) / 2)
    return max(read, 4 * shape.hidden / tp * pairs / (0.5 * machine.flops)) + 6 * machine.launch_s


def _matmul_s(machine: Machine, dtype: str, rows: int, m: float, n: float) -> float:
    share = dict(machine.many if rows > 4 else machine.single).get(dtype, 1.0)
    read = m * n * BITS[dtype] / 8 / (machine.bandwidth * share)
    return (
        max(read, 2 * rows * m * n / machine.flops)
        + 0.15 * min(read, rows * 2 * m * n / machine.flops)
        + (machine.launch_s)
    )


def _allreduce_s(machine: Machine, tp: int, message: float) -> float:
    if tp == 1:
        return 0.0
    rate, start = (
        (machine.pair_bytes_per_s, machine.pair_latency_s)
        if tp == 2
        else (machine.bus_bytes_per_s, machine.bus_latency_s)
    )
    return start * math.log2(tp) + 2 * (tp - 1) / tp * message / rate


def memory_bytes(machine: Machine, shape: Shape, query: Query, prompt_tokens: int) -> float:
    """Memory over all ranks: context, embedding and head, weights, cache, and a workspace by batch."""
    tp, total = query.tensor_parallel, 0.0
    bits = BITS[query.family.dtype]
    for stage, layers in enumerate(query.layers_per_stage):
        weights = sum(m * n for m, n, _ in shape.matrices) * bits / 8 / tp + 4 * shape.hidden * 2
        kv = 2 * shape.hidden // shape.heads * shape.kv_heads * (1 if query.family.int8_kv else 2) / tp
        cache = query.batch * (prompt_tokens + query.output_tokens) * kv
        rank = machine.context_bytes + layers * (_pages(weights) + _pages(cache))
        rank += shape.vocab * shape.hidden * 2 if stage == 0 else 0
        rank += shape.vocab * shape.hidden * 2 / tp if stage == query.pipeline_parallel - 1 else 0
        rank += query.batch * 1024 * 2 * (3 * shape.hidden + 2 * shape.inner / tp)
        rank += 90 * MIB * (tp > 1) + 60 * MIB * (query.pipeline_parallel > 1)
        total += tp * _pages(rank)
    return total


def _pages(size: float) -> float:
    return math.ceil(size / (2 * MIB)) * 2 * MIB


def fits(machine: Machine, shape: Shape, query: Query, prompt_tokens: int) -> bool:
    return memory_bytes(machine, shape, query, prompt_tokens) / query.ranks < machine.gpu_bytes


def even(layers: int, stages: int) -> tuple[int, ...]:
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))


@dataclass(frozen=True)
class Bench:
    """Measures queries on a machine with multiplicative noise of standard deviation `noise`.

    `engine_noise`: the same of an engine, which several rows share; `jitter_s`: what is added to a run.
    """

    machine: Machine = A6000
    noise: float = 0.005
    prompt_tokens: int = 923
    seed: int = 0
    engine_noise: float = 0.0
    jitter_s: float = 0.0

    def measure(self, queries: Iterable[Query]) -> tuple[Measurement, ...]:
        random = np.random.default_rng(self.seed)
        engines: dict[tuple[Family, int, tuple[int, ...]], float] = {}
        rows = []
        for line, query in enumerate(queries, 2):
            shape = SHAPES[query.family.model]
            latency = latency_s(self.machine, shape, query, self.prompt_tokens)
            memory = memory_bytes(self.machine, shape, query, self.prompt_tokens)
            latency *= float(np.exp(random.normal(0, self.noise)))
            if self.engine_noise:
                engine = (query.family, query.tensor_parallel, query.layers_per_stage)
                latency *= engines.setdefault(engine, float(np.exp(random.normal(0, self.engine_noise))))
            if self.jitter_s:
                latency += abs(float(random.normal(0, self.jitter_s)))
            rows.append(Measurement(query, latency, memory, line))
        return tuple(rows)


def families(models: Iterable[str] = SHAPES) -> list[Family]:
    found = []
    for model in models:
        found += [Family(model, dtype, False) for dtype in ("float16", "int8", "int4")]
        if model.startswith("llama"):
            found += [Family(model, dtype, True) for dtype in ("float16", "int8", "int4")]
            found.append(Family(model, "int4_gptq", False))
    return found


def plans(model: str) -> list[tuple[int, int]]:
    deep = [(1, pp) for pp in range(1, 9)]
    if model == "falcon-7b":  # 71 heads
        return deep
    return [*deep, *((2, pp) for pp in range(1, 5)), (4, 1), (4, 2), (8, 1)]


def fingerprints(few: bool, batches: Iterable[int] = (1,), models: Iterable[str] = SHAPES) -> Iterator[Query]:
    """The artifact's fingerprints: n = PP and PP + 1 layers, 10 and 20 tokens; `few`: three plans only."""
    for family in families(models):
        for tp, pp in plans(family.model):
            if few and tp * pp > 2:
                continue
            for batch in batches:
                for layers in (pp, pp + 1):
                    for output in (10, 20):
                        yield Query(family, tp, even(layers, pp), output, batch)


def full_models(
    bench: Bench, batches: Iterable[int], outputs: Iterable[int] = (100,), models: Iterable[str] = SHAPES
) -> Iterator[Query]:
    for family in families(models):
        shape = SHAPES[family.model]
        for tp, pp in plans(family.model):
            for batch in batches:
                for output in outputs:
                    query = Query(family, tp, even(shape.layers, pp), output, batch)
                    if fits(bench.machine, shape, query, bench.prompt_tokens):
                        yield query


def as_csv(rows: Iterable[Measurement], fingerprint: bool = False) -> str:
    extra = "Time-Gen-Fingerprint," if fingerprint else ""
    head = "Model,TP,PP,PP_Map,DTYPE,INT8_KV_Cache,Output_Lenght,Batch_Size,Latency,Memory-Pre-Run,"
    lines = [f"{head}Memory-After-Run,{extra}Time-Gen-Graph,Time-Prof"]
    for row in rows:
        q, memory = row.query, "" if row.memory_bytes is None else repr(row.memory_bytes / GIB)
        cells = [
            *(q.family.model, q.tensor_parallel, q.pipeline_parallel, " ".join(map(str, q.layers_per_stage))),
            *(q.family.dtype, q.family.int8_kv, q.output_tokens, q.batch, repr(row.latency_s)),
            *(memory, memory),
        ]
        times = ["1.5"] * (3 if fingerprint else 2)
        lines.append(",".join(map(str, [*cells, *times])))
    return "\n".join(lines) + "\n"


def table(rows: Iterable[Measurement], name: str = "simulated") -> Table:
    return Table(name, tuple(rows), ())
