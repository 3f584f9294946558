"""The memory that a profile sets aside for its engines, against what they took on H200s."""

from __future__ import annotations

from pathlib import Path

from benchmarks.profiling.results import by_shape
from benchmarks.profiling.shapes import spec
from benchmarks.profiling.tasks import DEVICE_BYTES, MAX_MODEL_LEN
from profiler.measurements import Footprint
from profiler.profiling_plan import Reach, cached_bytes, needed_bytes, profiling_plan

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "profiling" / "fingerprints.jsonl"


def test_engines_took_less_memory_than_their_reservations() -> None:
    """Memory on H200s, in addition to what the loads kept in their caches, which was of any size there."""
    seen, compared = by_shape(RESULTS), 0
    for name, measurements in seen.items():
        reach = Reach(False, 4, DEVICE_BYTES, MAX_MODEL_LEN, 128, 2048, quantizations=("fp8",))
        engine_runs = {run.setting: run for run in profiling_plan(spec(name), reach) if not run.variants}
        for found in measurements:
            if isinstance(found, Footprint) and (run := engine_runs.get(found.setting)):
                set_aside = needed_bytes(spec(name), run, reach) - cached_bytes(spec(name), run)
                assert max(map(found.taken, found.ranks)) < set_aside, (name, found.setting)
                compared += 1
    assert compared >= 14  # four of each model, and two of one in fp8
