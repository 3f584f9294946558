"""Input and output of a prediction."""

from __future__ import annotations

from dataclasses import dataclass

from profiler.physical.calibration import Calibration
from profiler.physical.variants import VariantLoad
from profiler.request_path import RequestPath
from profiler.roofline import CONTEXT_ONLY, Overheads
from profiler.types import Basis, DeviceRates, Interval, ModelSpec


@dataclass(frozen=True)
class Ground:
    """What is known when a plan is estimated. `rates` has one entry per rank (see `profiler.roofline`).

    `free_bytes`, by rank, is the memory that its device has left for it; if empty, no capacity is predicted.
    `shared` is the number of ranks on one device. `measured` are the rates of the calibration's device, if
    that is of another kind than the ranks'. `overheads` are a rank's assumed needs in addition to the model,
    used if no footprint shows them. `launched` are the kinds of variants whose kernels the engine launches in
    every batch with variants (`profiler.measurements.Setting`). `path` is the request path to the engine, if
    it was measured.
    """

    spec: ModelSpec
    rates: tuple[DeviceRates, ...]
    calibration: Calibration | None = None
    free_bytes: tuple[int, ...] = ()
    shared: int = 1
    measured: DeviceRates | None = None
    overheads: Overheads = CONTEXT_ONLY
    launched: tuple[str, ...] = ()
    path: RequestPath | None = None


@dataclass(frozen=True)
class RankCost:
    """Bytes on one rank. `kv_cache` is that of the load's own tokens, `total` the sum."""

    weights: int
    activations: int
    graphs: int
    runtime: int
    variants: int
    kv_cache: int
    total: Interval


@dataclass(frozen=True)
class Prediction:
    """Costs for `workload.batch` requests that arrive at once at an idle engine. Seconds; tokens are output
    tokens.

    `ttft_s` and `tpot_s` are means over the requests; `latency_s` is the time until the last one ends. They
    are what clients see, whose requests wait between tokens for other prompts. `step_s` is a token's time
    while no prompts are filled, `ttft_last_s` the last request's TTFT; both are the engine's alone. If the
    request path was measured, `ttft_s`, `tpot_s` and `latency_s` include it. Then `path_s` is the path's time
    and `engine_ttft_s` the engine's time for prompts that reach it together; for one request `ttft_s` is
    their sum. `kv_capacity_tokens` is what the devices' free memory can hold in addition, `concurrency` the
    number of such requests; None if free memory is unknown. `notes` say what was not measured.
    """

    ttft_s: Interval
    tpot_s: Interval
    ttft_last_s: Interval
    step_s: Interval
    latency_s: Interval
    tokens_per_s: Interval
    ranks: tuple[RankCost, ...]
    kv_capacity_tokens: int | None
    concurrency: int | None
    basis: Basis
    variants: VariantLoad
    notes: tuple[str, ...] = ()
    engine_ttft_s: Interval | None = None
    path_s: Interval | None = None
