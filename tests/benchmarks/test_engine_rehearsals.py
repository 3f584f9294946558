"""Rehearsals of benchmarks that start engines of vLLM, as test_rehearsals.py has them of the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.all_rehearsals import ROOT, STARTING_AN_ENGINE, WITH_ENGINE, rehearse, with_marks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", with_marks(STARTING_AN_ENGINE))
def test_every_rehearsal_runs(name: str, tmp_path: Path) -> None:
    rehearse(name, tmp_path)


def test_those_that_measure_inside_an_engine_run(tmp_path: Path) -> None:
    """In a process of its own, with one engine for all of them."""
    command = [sys.executable, "-m", "benchmarks.rehearsal_engine", *WITH_ENGINE, "--folder", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        command,
        env={**environment, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-4000:]
