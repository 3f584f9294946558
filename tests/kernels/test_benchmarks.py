"""The kernels' benchmarks: that they run, and that what they wrote can be drawn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["lora", "sparse_delta", "svd_delta"])
def test_tiny_cases_are_right(operation: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.kernels", operation, "--check", "--out", str(tmp_path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    found = subprocess.run(
        [*command, "--where", "batch=8"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    assert ": right, error" in found.stdout


@pytest.mark.slow
def test_results_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.kernels.plot import draw

    def row(us: float, **labels: object) -> dict:
        return {"labels": labels, "contender": "ostinato", "us": us, "floor_us": us / 2}

    rows = {
        "lora": [row(2.0, shape="o", batch=8, adapters="8xr16", distribution="uniform")],
        "sparse_delta": [row(2.0, shape="o", batch=8, bits=2, variants=8, distribution="distinct")],
        "boft": [row(2.0, shape="o", work="rotate", adapters=16, kind="m1b32")],
    }
    for operation, found in rows.items():
        record = json.loads(json.dumps({"operation": operation, "device": "GPU", "rows": found}))
        draw(record, tmp_path / f"{operation}.png")
        assert (tmp_path / f"{operation}.png").stat().st_size > 1000
