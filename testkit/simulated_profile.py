"""A profile of Llama-2-7B that a simulated engine gave, and questions on its ground."""

from __future__ import annotations

from dataclasses import replace

from profiler.measurements import Footprint, Measurement, RankMemory
from profiler.physical.calibrating import calibrate
from profiler.predicting.predict import Ground
from profiler.profiling_plan import Reach, profiling_plan
from profiler.types import DeviceRates, Plan
from testkit.engine_simulator import Machine, measured
from testkit.known_models import LLAMA_7B

BUDGET, OUT, MIB = 8192, 64, 1 << 20
MACHINE = Machine()
RATES = DeviceRates(3.5e12, 600e12)


def measurements() -> list[Measurement]:
    """What a profile on two GPUs measures, but for its pipeline: TP of 1 and 2."""
    engine_runs = profiling_plan(LLAMA_7B, Reach(False, 2, 80 << 30, 4096, 128, BUDGET))
    memory = RankMemory(0, 300 * MIB, 100 * MIB, 500 * MIB, 0, 0)
    found: list[Measurement] = []
    for run in engine_runs:
        setting = run.setting
        if len(setting.layers_per_stage) == 1:
            found.append(Footprint(setting, (memory,) * setting.tensor_parallel, 1.0))
            points = [point for point in run.points if not point.mix]
            found += [measured(MACHINE, setting, p, run.output_tokens, BUDGET) for p in points]
    return found


CALIBRATION = calibrate(LLAMA_7B, measurements())


def plan(tp: int = 1, layers: tuple[int, ...] = (32,), **changes: object) -> Plan:
    made = Plan(tp, layers, "none", 4096, 16 * 4096, 0, 0, batched_tokens=BUDGET)
    return replace(made, **changes)  # type: ignore[arg-type]


def ground(p: Plan, known: bool = True, free: int = 0, shared: int = 1) -> Ground:
    rates = tuple(replace(RATES) for _ in range(max(1, p.world_size)))
    free_bytes = (free,) * p.world_size if free else ()
    return Ground(LLAMA_7B, rates, CALIBRATION if known else None, free_bytes, shared)
