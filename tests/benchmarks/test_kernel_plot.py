"""The results of the kernels' benchmarks can be drawn. tests/benchmarks shows that they run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.slow
def test_results_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.kernels.plot import draw

    def row(us: float, **labels: object) -> dict[str, Any]:
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
