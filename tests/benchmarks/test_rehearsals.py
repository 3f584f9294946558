"""Every benchmark still runs: its rehearsal, on tiny shapes and a CPU. One without a rehearsal fails here."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import rehearsing
from tests.benchmarks.all_rehearsals import (
    REHEARSED,
    ROOT,
    RUNNABLE,
    SLOW,
    STARTING_AN_ENGINE,
    WITH_ENGINE,
    constant,
    rehearse,
    with_marks,
)


def test_all_are_found() -> None:
    known = {"gateway", "kernels", "placement", "profiling", "serving"}
    assert known <= set(RUNNABLE)
    assert set(REHEARSED) >= SLOW, "a name in SLOW is no benchmark's"


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_benchmark_has_a_rehearsal(name: str) -> None:
    """Its own, or that of the benchmark it is a part of (`REHEARSED_BY`)."""
    tree = RUNNABLE[name]
    if part_of := constant(tree, "REHEARSED_BY"):
        assert part_of.removeprefix("benchmarks.") in REHEARSED
        return
    assert name in REHEARSED, f"benchmarks.{name} has no rehearse(folder); see benchmarks/README.md"
    assert ast.unparse(tree.body[-1]).endswith("rehearsing.run(main, rehearse)")


@pytest.mark.parametrize("name", with_marks(REHEARSED.keys() - set(WITH_ENGINE) - STARTING_AN_ENGINE))
def test_every_rehearsal_runs(name: str, tmp_path: Path) -> None:
    rehearse(name, tmp_path)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root")
def test_hardening_runs_on_three_hosts(tmp_path: Path) -> None:
    """tests/cluster/echo_engine/test_two_hosts.py kills nodes in every run of the tests."""
    from benchmarks.hardening.__main__ import rehearse_hosts

    rehearsing.carry_out(rehearse_hosts, tmp_path)


def test_every_rehearsal_runs_from_the_command_line() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.compression.allocation", rehearsing.FLAG],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == "rehearsed"


def test_a_rehearsal_marks_what_it_writes_and_keeps_out_of_the_results(tmp_path: Path) -> None:
    rehearsing.write_result(tmp_path / "real.json", {"rows": [1]})
    with pytest.raises(KeyError):
        rehearsing.check(tmp_path / "real.json")
    with rehearsing.rehearsal():
        rehearsing.write_result(tmp_path / "tried.json", {"rows": [1]})
        with pytest.raises(ValueError, match="expected a temporary folder"):
            rehearsing.write_result(rehearsing.RESULTS / "tried.json", {"rows": [1]})
    assert rehearsing.check(tmp_path / "tried.json", "rows")["rows"] == [1]
    assert not rehearsing.is_rehearsal()
