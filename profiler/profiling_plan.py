"""The measurements of a profile: a few settings of a model's fingerprint, each at a few loads. Pure.

A fingerprint is as deep as the model, but holds only as many different layers as exceed the device's caches
(docs/profiler.md). On GPUs, the plan measures:

- a second, shallower fingerprint, which shows what depends on depth
- each TP that fits, and one pipeline
- for each kind of variants an engine with synthetic variants, started as a deployed engine is for such
  variants, and one engine for all kinds
- each TP in every other quantization that the request names

The largest load takes a third of the whole time, so the shallow fingerprint and the runs with TP leave it
out. On a CPU a model is not split, and starting an engine is most of the cost. There is one fingerprint for
each quantization, and the ratio of their bytes separates the head from the layers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from profiler.measurements import Point, Setting, SyntheticVariant
from profiler.plans import even_stages
from profiler.roofline import allowance_bytes
from profiler.shards import (
    cut_problem,
    kv_bytes_per_token,
    layer_shard_bytes,
    outer_bytes,
    tp_fits,
    vocab_table_bytes,
)
from profiler.types import ModelSpec, Plan, adaptable_linears
from profiler.variants.synthetic import stored_bytes
from profiler.variants.types import VariantKind, launched_kinds

MIB = 2**20
CPU_CACHE_BYTES = 512 * MIB  # more than a server CPU's last-level cache holds
GPU_CACHE_BYTES = 256 * MIB  # more than an H200's 50 MiB, several times
CPU_OUTPUT_TOKENS, GPU_OUTPUT_TOKENS = 12, 32
CPU_PROCESS_BYTES = 1536 * MIB  # an engine's own process, with torch
# Bytes of a rank on H200s: CUDA context and captured graphs; and channels, if the rank communicates with
# others.
GPU_RUNTIME_BYTES, GPU_COMPANY_BYTES = 1536 * MIB, 2048 * MIB
MAX_TP = 8
MAX_DISTINCT = 8  # synthetic variants of a kind


@dataclass(frozen=True)
class Reach:
    """The devices that profiling may use, and how the engines that will be deployed are set up.

    `devices` are devices of one node, each with `device_bytes` free for profiling. `quantizations` are
    measured in addition to the uncompressed model. `max_variants` is the number of slots for variants."""

    on_cpu: bool
    devices: int
    device_bytes: int
    max_model_len: int
    max_sequences: int
    batched_tokens: int
    max_lora_rank: int = 16
    quantizations: tuple[str, ...] = ()
    max_variants: int = 0


@dataclass(frozen=True)
class EngineRun:
    """One start of the engine: its setting, its loads, and how many different layers it holds. If there are
    variants, it has at least `slots` slots for them."""

    setting: Setting
    points: tuple[Point, ...]
    distinct_layers: int
    output_tokens: int
    slots: int = 0

    @property
    def variants(self) -> tuple[SyntheticVariant, ...]:
        """Every variant that the loads name."""
        return tuple(dict.fromkeys(variant for point in self.points for variant in point.mix))


def profiling_plan(spec: ModelSpec, reach: Reach) -> tuple[EngineRun, ...]:
    """Engine runs that fit `reach.device_bytes`, the most informative first.

    Raises ValueError if not even the first run fits, with the bytes that it needs.
    """
    engine_runs = tuple(_engine_runs(spec, reach))
    first = needed_bytes(spec, engine_runs[0], reach)
    if first > reach.device_bytes:
        raise ValueError(
            f"measuring needs {first / MIB:.0f} MiB on one device, but may use only "
            f"{reach.device_bytes / MIB:.0f} MiB; free device memory, or raise OSTINATO_PROFILE_BYTES"
        )
    fitted = (_fitted(spec, run, reach) if run.variants else run for run in engine_runs)
    return tuple(run for run in fitted if needed_bytes(spec, run, reach) <= reach.device_bytes)


def _fitted(spec: ModelSpec, run: EngineRun, reach: Reach) -> EngineRun:
    """Drop the loads with most variants and most tokens until the run fits."""
    points = sorted(run.points, key=lambda point: (len(set(point.mix)), point.batch * point.input_tokens))
    while len(points) > 1 and needed_bytes(spec, run, reach) > reach.device_bytes:
        points = points[:-1]
        run = replace(run, points=tuple(point for point in run.points if point in points))
    return run


def needed_bytes(spec: ModelSpec, run: EngineRun, reach: Reach) -> int:
    """An upper bound of bytes on each device: the stage with embedding and head, the loads' KV cache, and
    working memory."""
    setting = run.setting
    tp, layers = setting.tensor_parallel, max(setting.layers_per_stage)
    held = min(layers, run.distinct_layers)
    weights = held * layer_shard_bytes(spec, tp) + 2 * vocab_table_bytes(spec, tp) + outer_bytes(spec)
    plan = Plan(
        tp, setting.layers_per_stage, "none", reach.max_model_len, 0, 0, 0, 0, 0, reach.batched_tokens
    )
    working = allowance_bytes(spec, plan, plan.pipeline_parallel - 1)
    variants = sum(held * stored_bytes(spec, variant) for variant in run.variants)
    if reach.on_cpu:  # a CPU engine keeps its weights packed and as they were, and variants in both tiers
        return 2 * (weights + variants) + cached_bytes(spec, run) + working + CPU_PROCESS_BYTES
    company = GPU_COMPANY_BYTES if setting.world_size > 1 else 0
    return weights + variants + cached_bytes(spec, run) + working + GPU_RUNTIME_BYTES + company


def cached_bytes(spec: ModelSpec, run: EngineRun) -> int:
    """Keys and values of the run's largest load, on each device."""
    setting = run.setting
    held = min(max(setting.layers_per_stage), run.distinct_layers)
    tokens = max(
        p.batch * (p.input_tokens + run.output_tokens + setting.prefill_steps(p.batch, p.input_tokens))
        for p in run.points
    )
    return held * kv_bytes_per_token(spec, setting.tensor_parallel) * tokens


def count_points(engine_runs: tuple[EngineRun, ...]) -> int:
    return sum(len(run.points) for run in engine_runs)


def _engine_runs(spec: ModelSpec, reach: Reach) -> Iterator[EngineRun]:
    layers = spec.num_layers
    points, mixed = _points(reach), _mixed_points(spec, reach)
    if reach.on_cpu:
        every = tuple(dict.fromkeys(point for of_kind in mixed.values() for point in of_kind))
        yield _engine_run(
            spec, reach, Setting((layers,), batched_tokens=reach.batched_tokens), points + every
        )
        yield from _in_quantizations(spec, reach, 1, points)
        return
    for tp in _degrees(spec, reach):
        setting = Setting((layers,), tp, batched_tokens=reach.batched_tokens)
        yield _engine_run(spec, reach, setting, points if tp == 1 else _without_largest(points))
        if tp == 1 and layers > 1:  # tells a layer from the rest, for every TP
            shallow = Setting((layers // 2,), tp, batched_tokens=reach.batched_tokens)
            yield _engine_run(spec, reach, shallow, _without_largest(points))
    if reach.devices > 1 and layers > 1:
        pipeline = Setting(even_stages(layers, 2), batched_tokens=reach.batched_tokens)
        yield _engine_run(spec, reach, pipeline, points)
    for kinds, of_kinds in mixed.items():
        launched = tuple(one.value for one in launched_kinds(kinds))
        setting = Setting((layers,), batched_tokens=reach.batched_tokens, launched=launched)
        yield _engine_run(spec, reach, setting, of_kinds)
    for tp in _degrees(spec, reach):
        yield from _in_quantizations(spec, reach, tp, points)


def _in_quantizations(
    spec: ModelSpec, reach: Reach, tp: int, points: tuple[Point, ...]
) -> Iterator[EngineRun]:
    for quantization in reach.quantizations:
        if cut_problem(spec, tp, quantization) is None:
            setting = Setting((spec.num_layers,), tp, quantization, batched_tokens=reach.batched_tokens)
            yield _engine_run(spec, reach, setting, points if tp == 1 else _without_largest(points))


def _without_largest(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """The points without the largest, unless only the largest has its batch size or prompt length."""
    largest = max(points, key=lambda point: point.batch * point.input_tokens)
    others = tuple(point for point in points if point != largest)
    batches, lengths = {p.batch for p in others}, {p.input_tokens for p in others}
    return others if largest.batch in batches and largest.input_tokens in lengths else points


def _degrees(spec: ModelSpec, reach: Reach) -> list[int]:
    return [tp for tp in range(1, min(reach.devices, MAX_TP) + 1) if tp_fits(spec, tp)]


def _engine_run(spec: ModelSpec, reach: Reach, setting: Setting, points: tuple[Point, ...]) -> EngineRun:
    cache = CPU_CACHE_BYTES if reach.on_cpu else GPU_CACHE_BYTES
    layer = layer_shard_bytes(spec, setting.tensor_parallel, setting.quantization)
    distinct = max(2, math.ceil(cache / layer))
    slots = reach.max_variants if any(point.mix for point in points) else 0
    return EngineRun(setting, points, min(distinct, spec.num_layers), _output_tokens(reach), slots)


def _output_tokens(reach: Reach) -> int:
    """Enough tokens to measure the pace of decoding; fewer if there are few positions."""
    wanted = CPU_OUTPUT_TOKENS if reach.on_cpu else GPU_OUTPUT_TOKENS
    return min(wanted, max(4, reach.max_model_len // 2))


def _points(reach: Reach) -> tuple[Point, ...]:
    """Loads within the limits of the deployed engines: simultaneous sequences and positions."""
    if reach.on_cpu:
        wanted = [(1, 32), (1, 256), (4, 64), (16, 32)]
    else:
        wanted = [(b, 128) for b in (1, 2, 4, 8, 16, 32, 64, 128)] + [(b, 1024) for b in (1, 8, 32, 128)]
    return tuple(dict.fromkeys(_within(reach, batch, length) for batch, length in wanted))


def _within(reach: Reach, batch: int, length: int, mix: tuple[SyntheticVariant, ...] = ()) -> Point:
    """The load, or a smaller load that deployed engines take; prompts leave room for all requests' steps."""
    batch = min(batch, reach.max_sequences)
    room = max(1, reach.max_model_len - _output_tokens(reach))
    per_token = 1 + batch / reach.batched_tokens  # each token of a prompt, and its share of the prefill steps
    return Point(batch, max(1, min(length, int((room - 1) / per_token))), mix)


def _mixed_points(spec: ModelSpec, reach: Reach) -> dict[tuple[str, ...], tuple[Point, ...]]:
    """Loads with variants, by the kinds of variants that an engine is started for.

    Each load is also measured without variants. On a GPU each kind has an engine of its own. Its loads have
    few requests and as many as engines run; they use one variant, two, and as many as there are slots. Some
    prompts take several steps. The engine also measures LoRA, which shows the cost of the kind's kernels when
    they are unused, and both together. The last engine has all kinds. On a CPU, where loads take long, LoRA
    is measured with a single request and with the most requests, other kinds with several.
    """
    if not spec.adaptable:
        return {}
    kinds = dict(
        _synthetic_variants(spec, reach.max_lora_rank, max(2, min(MAX_DISTINCT, reach.max_variants)))
    )
    if reach.on_cpu:
        return {(kind,): _unique(_on_cpu(reach, kind, made)) for kind, made in kinds.items()}
    lora = kinds.pop(VariantKind.LORA.value)
    points: dict[tuple[str, ...], tuple[Point, ...]] = {
        (VariantKind.LORA.value,): _unique(_of_kind(reach, lora))
    }
    for kind, made in kinds.items():
        beside = [_within(reach, 8, 128, lora[:1]), *_of_mix(reach, [lora, made])]
        points[kind,] = _unique([*_of_kind(reach, made), *beside])
    if len(kinds) > 1:
        points[tuple(kinds)] = _unique(_of_mix(reach, [lora, *kinds.values()]))
    return points


def _unique(points: Iterable[Point]) -> tuple[Point, ...]:
    return tuple(dict.fromkeys(points))


Made = tuple[SyntheticVariant, ...]


def _on_cpu(reach: Reach, kind: str, made: Made) -> list[Point]:
    several = _within(reach, 4, 64, made[:1]), _within(reach, 4, 64, made)
    if kind != VariantKind.LORA:
        return [*several]
    return [_within(reach, 1, 32, made[:1]), *several, _within(reach, 16, 32, made)]


def _of_kind(reach: Reach, made: Made) -> list[Point]:
    one, two = made[:1], made[:2]
    asked = [(1, 128, one), (8, 128, one), (8, 128, two), (8, 128, made)]
    asked += [(batch, 128, mix) for batch in (32, 128) for mix in (one, made)]
    asked += [(8, 1024, one), (8, 1024, made), (32, 1024, made)]
    return [_within(reach, *each) for each in asked]


def _of_mix(reach: Reach, kinds: Sequence[Made]) -> list[Point]:
    """One variant of each kind, and several."""
    few = tuple(made[0] for made in kinds)
    many = tuple(
        variant for together in zip(*(made[:2] for made in kinds), strict=True) for variant in together
    )
    return [
        _within(reach, *each) for each in ((8, 128, few), (32, 128, many), (128, 128, many), (8, 1024, few))
    ]


def _synthetic_variants(spec: ModelSpec, max_rank: int, count: int) -> Iterator[tuple[str, Made]]:
    """`count` variants of each kind, at least four of LoRA, if the model's widths allow the kind."""
    widths = {linear.into for linear in adaptable_linears(spec).values()}
    shares = itertools.cycle((1, 2, 4, 1))
    yield (
        VariantKind.LORA.value,
        tuple(
            SyntheticVariant(VariantKind.LORA.value, rank=max(1, max_rank // next(shares)), seed=seed)
            for seed in range(max(4, count))
        ),
    )
    if all(width % 8 == 0 for width in widths):
        yield (
            VariantKind.SPARSE_DELTA.value,
            tuple(
                SyntheticVariant(VariantKind.SPARSE_DELTA.value, bits=4, seed=seed) for seed in range(count)
            ),
        )
    if all(width % 32 == 0 for width in widths):
        shapes = itertools.cycle(((1, 8), (2, 16)))
        yield (
            VariantKind.BOFT.value,
            tuple(
                SyntheticVariant(VariantKind.BOFT.value, factors=m, block_size=b, seed=seed)
                for seed, (m, b) in zip(range(1, count + 1), shapes, strict=False)
            ),
        )
