"""An engine on a GPU with made-up weights of a shape, two layers' held, as benchmarks start it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.profiling import shapes
from benchmarks.profiling.tasks import MAX_MODEL_LEN
from profiler.measurements import Point, Setting
from workers.measuring.engine_run_job import Job


def gpu_job(shape: str, setting: Setting, loads: tuple[Point, ...], tokens: int, work: Path) -> Job:
    """It writes its folder into `work`, and asks for `tokens` of each request of the `loads`."""
    return Job(
        folder=shapes.folder(shape, setting.layers, work),
        out=work / "measured.jsonl",
        setting=setting,
        points=loads,
        device_kind="cuda",
        device_bytes=60 << 30,
        dtype="bfloat16",
        graphs=True,
        output_tokens=tokens,
        repeats=1,
        distinct_layers=2,
        max_model_len=MAX_MODEL_LEN,
        seconds=300,
        point_seconds=8,
    )
