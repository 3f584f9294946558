"""What a prediction starts from, and what it says."""

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

    `free_bytes`, by rank, is what its device has left for it; when empty, no capacity is predicted. `shared`
    is how many ranks run on one device. `measured` are the rates of the device that the calibration is from,
    if that is of another kind than the ranks'. `overheads` are a rank's assumed needs beside the model, where
    no footprint shows them. `launched` are the kinds of variants whose kernels the engine launches in every
    batch with variants (`profiler.measurements.Setting`). `path` is the request path to the engine, where
    that was measured.
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
    """Bytes on one rank. `kv_cache` is that of the load's own tokens, `total` everything."""

    weights: int
    activations: int
    graphs: int
    runtime: int
    variants: int
    kv_cache: int
    total: Interval


@dataclass(frozen=True)
class Prediction:
    """`workload.batch` requests that arrive at once at an idle engine. Seconds; tokens are output tokens.

    `ttft_s` and `tpot_s` are the means over them, `latency_s` is until the last ends: what clients see, who
    wait between their tokens for the prompts of others. `step_s` is a token's time while no prompts are
    filled, and `ttft_last_s` the last request's first token, both the engine's. Where the request path was
    measured it is in `ttft_s`, `tpot_s` and `latency_s`: `path_s` is then what that takes, and
    `engine_ttft_s` what the engine takes of prompts that reach it together; of one request `ttft_s` is their
    sum. `kv_capacity_tokens` is what the devices' free memory can hold beside the rest, `concurrency` how
    many such requests that is; None where free memory is not known. `notes` say what was not measured.
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
