"""Compiled functions called without a look at types do what they do when called as they are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from controlplane.routing import bookkeeping
from controlplane.routing.snapshot import REQUEST, new_snapshot
from controlplane.traffic.live_snapshot import equal_rows
from controlplane.traffic.machine_code import first_record, machine_code
from profiler.compiled import records


def test_machine_code_changes_the_same_memory() -> None:
    requests = records(REQUEST, 1)
    request = first_record(requests, REQUEST)
    requests[0].prompt, requests[0].output, requests[0].promise = 20.0, 8.0, 511
    found = [new_snapshot(2, 2, equal_rows()) for _ in range(2)]
    fast = machine_code(bookkeeping.sent, found[0], 0, request)
    for _ in range(3):
        fast(found[0], 1, request)
        bookkeeping.sent(found[1], 1, requests[0])
    assert [int(snapshot.groups[1].batch.rows) for snapshot in found] == [3, 3]
    assert found[0].groups.tobytes() == found[1].groups.tobytes()


def test_a_function_that_is_not_compiled_stays_itself() -> None:
    def function(number: int) -> int:
        return number

    assert machine_code(function, 1) is function


@pytest.mark.slow
def test_the_same_decisions_are_made_without_compiled_code(pytestconfig: pytest.Config) -> None:
    """A router runs as Python alone, too."""
    code = "from controlplane.gateway.warming import run_through; run_through()"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=pytestconfig.rootpath)
