"""No kernel is compiled while requests run: the warm-up has run every specialisation that any batch needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_row_count_finds_its_kernels_compiled() -> None:
    pytest.importorskip("triton", reason="Triton is what compiles the kernels")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "tests/benchmarks/specialisations.py"],
        env={**environment, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert json.loads(found.stdout) == []
