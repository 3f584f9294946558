"""Planned memory next to the memory that engines took on H200s."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.profiling.results import by_shape
from benchmarks.profiling.shapes import spec
from benchmarks.profiling.tasks import DEVICE_BYTES, MAX_MODEL_LEN
from profiler.measurements import Footprint
from profiler.predicting.memory import Memory
from profiler.predicting.predict import Ground
from profiler.profiling_plan import Reach, cached_bytes, needed_bytes, profiling_plan
from profiler.roofline import VLLM_ON_GPU
from profiler.types import DeviceRates, Plan

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "profiling"
MIB = 1 << 20


def test_engines_took_less_than_was_set_aside_for_them() -> None:
    """The cache of the loads is left out: engines gave it any size there."""
    seen, compared = by_shape(RESULTS / "fingerprints.jsonl"), 0
    for name, measurements in seen.items():
        reach = Reach(False, 4, DEVICE_BYTES, MAX_MODEL_LEN, 128, 2048, quantizations=("fp8",))
        engine_runs = {run.setting: run for run in profiling_plan(spec(name), reach) if not run.variants}
        for found in measurements:
            if isinstance(found, Footprint) and (run := engine_runs.get(found.setting)):
                set_aside = needed_bytes(spec(name), run, reach) - cached_bytes(spec(name), run)
                assert max(map(found.taken, found.ranks)) < set_aside, (name, found.setting)
                compared += 1
    assert compared >= 14  # four of each model, and two of one in fp8


def test_without_a_profile_ranks_are_given_what_engines_took_on_h200s() -> None:
    """A bfloat16 rank gets at most 32 MiB less and 1 GiB more. Only a profile sees what fp8 takes."""
    compared = 0
    for name, measurements in by_shape(RESULTS / "truth.jsonl").items():
        for found in measurements:
            if isinstance(found, Footprint) and found.setting.quantization == "none":
                setting = found.setting
                plan = Plan(setting.tensor_parallel, setting.layers_per_stage, "none", 1, 0, 0, 0)
                plan = replace(plan, batched_tokens=setting.batched_tokens)
                rates = (DeviceRates(1.0, 1.0),) * plan.world_size
                ranks = Memory(Ground(spec(name), rates, overheads=VLLM_ON_GPU), 0).ranks(plan)
                for rank, actual in zip(ranks, found.ranks, strict=True):
                    assert -32 * MIB <= rank.total.value - found.taken(actual) <= 1024 * MIB, (name, setting)
                    compared += 1
    assert compared >= 29
