"""Jobs of the measuring process on tiny models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from profiler.measurements import Point, Setting
from testkit import random_variants
from workers.measuring.engine_run_job import Job

ROOT = Path(__file__).parents[2]
SHAPE = {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "intermediate_size": 128,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
}


def a_job(tmp_path: Path, setting: Setting, points: tuple[Point, ...], **more: Any) -> Job:
    """A job for a model in `tmp_path` without weights: none are read."""
    folder = random_variants.write_tiny_base(
        tmp_path / "model", **SHAPE, num_hidden_layers=max(2, setting.layers)
    )
    (folder / "model.safetensors").unlink()
    return job_of(folder, tmp_path, setting, points, **more)


def job_of(folder: Path, tmp_path: Path, setting: Setting, points: tuple[Point, ...], **more: Any) -> Job:
    return Job(
        folder=folder,
        out=tmp_path / "found.jsonl",
        setting=setting,
        points=points,
        device_kind="cpu",
        device_bytes=1 << 30,
        dtype="float32",
        max_model_len=128,
        graphs=False,
        **{"output_tokens": 6, "repeats": 1, "own_process": False, **more},
    )


def measured(job: Job, tmp_path: Path, *program: str) -> str:
    """What the measuring process prints; another `program` may take its place."""
    request = tmp_path / "job.json"
    request.write_text(job.model_dump_json())
    done = subprocess.run(
        [sys.executable, *(program or ("-m", "workers.measuring")), str(request)],
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
