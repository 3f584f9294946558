"""The runs for a shape: plans of the whole model, and the runs of its profile; and their expected time on
H200s, to plan with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from benchmarks.profiling.shapes import SHAPES, spec
from profiler.measurements import Point, Setting
from profiler.plans import even_stages
from profiler.profiling_plan import Reach, profiling_plan
from profiler.quantization import UNCOMPRESSED
from profiler.roofline import estimate
from profiler.types import DeviceRates, Plan, Workload
from workers.measuring.timing import warm_up_tokens

POINTS = tuple(Point(batch, length) for batch in (1, 8, 32, 128) for length in (128, 1024))
CPU_POINTS = tuple(Point(batch, length) for batch in (1, 4) for length in (32, 128))
OUTPUT_TOKENS = 48
MAX_MODEL_LEN = 1024 + OUTPUT_TOKENS + 72  # while the last of 128 prompts are filled, the first decode
DEVICE_BYTES = 120 << 30
REPEATS = 3
POINT_SECONDS = 8.0

H200 = DeviceRates(3.6e12, 5e14)  # about what is reached; only to plan with
# From the barrier to the first point: seen on H200s, with torch.compile 9 to 27 s of it.
START_S, START_MORE_S = 30.0, 3.0  # more where there are several ranks
SLACK_S = 5.0  # until devices are free again


class Kind(StrEnum):
    """In the order in which they are measured: without fingerprints nothing can be said of the others."""

    FINGERPRINTS = "fingerprints"
    TRUTH = "truth"
    VARIANTS = "variants"


@dataclass(frozen=True)
class Task:
    """One start of an engine. Those of tier 1 tell most; `distinct_layers` of 0 means all."""

    kind: Kind
    shape: str
    setting: Setting
    points: tuple[Point, ...]
    output_tokens: int = OUTPUT_TOKENS
    distinct_layers: int = 0
    tier: int = 1

    @property
    def gpus(self) -> int:
        return self.setting.world_size

    @property
    def label(self) -> str:
        """Unlike any other's; a file's name."""
        split = "-".join(map(str, self.setting.layers_per_stage))
        tp, quantization = self.setting.tensor_parallel, self.setting.quantization
        launched = "".join(f".{kind}" for kind in self.setting.launched)
        return f"{self.kind}.{self.shape}.tp{tp}.{split}.{quantization}{launched}"

    @property
    def expected_s(self) -> float:
        """That its devices are taken."""
        return self._start_s + sum(self._points_s) + SLACK_S

    @property
    def _start_s(self) -> float:
        return START_S + START_MORE_S * (self.gpus > 1)

    @property
    def _points_s(self) -> list[float]:
        return [_point_s(self.shape, self.setting, point, self.output_tokens) for point in self.points]


@cache
def _point_s(shape: str, setting: Setting, point: Point, output_tokens: int) -> float:
    """The requests of the warm-up and of the measured runs."""
    model = dataclasses.replace(spec(shape), num_layers=setting.layers)
    plan = Plan(setting.tensor_parallel, setting.layers_per_stage, "none", MAX_MODEL_LEN, 0, 0, 0)
    prefill_steps = setting.prefill_steps(point.batch, point.input_tokens)
    tokens = output_tokens + prefill_steps
    load = Workload(point.batch, point.input_tokens, tokens)
    once = estimate(model, plan, [H200] * setting.world_size, load, 1.0)
    run_s, warm_up_s = once.latency_s(tokens), once.latency_s(warm_up_tokens(prefill_steps, tokens))
    return warm_up_s + max(1, min(REPEATS, math.ceil((POINT_SECONDS - warm_up_s) / run_s))) * run_s


def truth(name: str, gpus: int, quantization: str = "none") -> list[Task]:
    """Every (TP, PP) of up to 4 ranks; pipelines even and in three uneven splits."""
    layers = SHAPES[name]["num_hidden_layers"]
    return [
        Task(Kind.TRUTH, name, Setting(split, tp, quantization), POINTS, tier=tier)
        for tier, tp, split in _plans(layers)
        if tp * len(split) <= gpus
    ]


def _plans(layers: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Tier, TP and layers of each stage."""
    for tp in (1, 2, 4):
        yield 1, tp, (layers,)
    for stages in (2, 4):
        first, *others = uneven(layers, stages)
        yield 1, 1, even_stages(layers, stages)
        yield 1, 1, first
        yield from ((2, 1, split) for split in others)
    yield 3, 2, even_stages(layers, 2)
    yield from ((3, 2, split) for split in uneven(layers, 2))


def uneven(layers: int, stages: int) -> list[tuple[int, ...]]:
    """Three splits that are not even, with the largest stage last, first and (of four) between."""
    if stages == 2:
        firsts = (round(layers * 0.3), round(layers * 0.4), round(layers * 0.65))
        return [(first, layers - first) for first in firsts]
    quarter, step = layers // stages, layers // 8
    last = layers - 3 * quarter
    return [
        (quarter - step, quarter, quarter, last + step),
        (quarter + step, quarter, quarter, last - step),
        (quarter, quarter + step, quarter, last - step),
    ]


def fingerprints(name: str, gpus: int, quantization: str = "none") -> list[Task]:
    """The runs of `ostinato profile` on such a host (profiler/profiling_plan.py), without variants."""
    return [
        task for task in _profile(name, gpus, quantization) if not any(point.mix for point in task.points)
    ]


def variants(name: str, gpus: int, quantization: str = "none") -> list[Task]:
    """The runs of a profile with synthetic variants."""
    return [
        dataclasses.replace(task, kind=Kind.VARIANTS)
        for task in _profile(name, gpus, quantization)
        if any(point.mix for point in task.points)
    ]


def _profile(name: str, gpus: int, quantization: str) -> list[Task]:
    """In this quantization; what a profile measures in another quantization than none is less."""
    quantizations = () if quantization == UNCOMPRESSED else (quantization,)
    reach = Reach(
        False,
        gpus,
        DEVICE_BYTES,
        MAX_MODEL_LEN,
        max(p.batch for p in POINTS),
        2048,
        quantizations=quantizations,
    )
    return [
        Task(
            Kind.FINGERPRINTS,
            name,
            run.setting,
            run.points,
            run.output_tokens,
            run.distinct_layers,
        )
        for run in profiling_plan(spec(name), reach)
        if run.setting.quantization == quantization
    ]


def chosen(
    kinds: Sequence[Kind], shapes: Sequence[str], quantizations: Sequence[str], gpus: int, tier: int
) -> list[Task]:
    """The tasks of a host with `gpus`, shape by shape, of `tier` or a more informative one."""
    makers = {Kind.TRUTH: truth, Kind.FINGERPRINTS: fingerprints, Kind.VARIANTS: variants}
    return [
        task
        for name in shapes
        for quantization in quantizations
        for kind in kinds
        for task in makers[kind](name, gpus, quantization)
        if task.tier <= tier
    ]


def on_cpu(task: Task) -> Task:
    """The same start with loads that a CPU takes seconds for."""
    return dataclasses.replace(task, points=CPU_POINTS, output_tokens=8)
