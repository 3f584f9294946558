"""Which tests run side by side when several processes run them (`make test`).

A unit is what one process runs in a row: a folder whose tests share what takes long to make, a file, or one
test of a file whose tests share nothing. Only the first two processes start engines: each may need 8 GiB. The
other processes take units without engines, among them the clusters whose engines echo. When no unit with
engines is left, the first two processes help the others. Long units begin first, so that none runs alone at
the end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xdist.scheduler import LoadScopeScheduling

# Folders whose tests share a cluster or an engine.
SHARING = (
    "tests/cluster/echo_engine",
    "tests/cluster/vllm_engine",
    "tests/cluster/whole_model",
    "tests/workers/every_kind",
)
# Files of these folders that start a cluster of their own.
APART = ("tests/cluster/echo_engine/test_two_hosts.py",)
# Files whose tests share nothing, and take long.
SEPARATE = ("tests/benchmarks/test_engine_rehearsals.py", "tests/benchmarks/test_rehearsals.py")
STARTING_ENGINES = tuple(
    f"tests/{folder}"
    for folder in (
        "benchmarks/test_engine_rehearsals.py",
        "cluster/own_nodes",
        "cluster/vllm_engine",
        "cluster/whole_model",
        "workers/every_kind",
        "workers/group/test_group_engine.py",
        "workers/measuring",
        "workers/scheduling/test_engine.py",
        "workers/test_batch_correctness.py",
        "workers/test_bundled",  # what converts a model takes as much memory
        "workers/test_families.py",
        "workers/test_layouts_served.py",
        "workers/test_own_words.py",
        "workers/test_vllm_load.py",
    )
)
# The units that take minutes, the longest first. Other units follow, first those with engines.
LONGEST = (
    "tests/cluster/vllm_engine",
    "tests/cluster/echo_engine",
    "tests/cluster/own_nodes/test_getting_started.py",
    "tests/cluster/echo_engine/test_two_hosts.py",
    "tests/cluster/whole_model",
    "tests/benchmarks/test_rehearsals.py::test_every_rehearsal_runs[overload]",
    "tests/workers/every_kind",
    "tests/compression/test_compressing_process.py",
    "tests/benchmarks/test_rehearsals.py::test_every_rehearsal_runs[hardening]",
    "tests/benchmarks/test_engine_rehearsals.py::test_every_rehearsal_runs[fuzzing.bodies]",
    "tests/cluster/own_nodes/test_group_nodes.py",
    "tests/workers/group/test_group_engine.py",
    "tests/benchmarks/test_rehearsals.py::test_every_rehearsal_runs[unread_streams]",
    "tests/benchmarks/test_rehearsals.py::test_every_rehearsal_runs[overloaded_engine]",
    "tests/benchmarks/test_engine_rehearsals.py::test_those_that_measure_inside_an_engine_run",
    "tests/workers/test_families.py",
    "tests/workers/fetching/test_hub_source.py",
    "tests/benchmarks/test_rehearsals.py::test_every_rehearsal_runs[compression.quality]",
    "tests/benchmarks/test_rehearsals.py::test_every_rehearsal_runs[kernels]",
)
PROCESSES_WITH_ENGINES = ("gw0", "gw1")


def unit_of(nodeid: str) -> str:
    """The test, the file or the folder that a test is run with."""
    file = nodeid.partition("::")[0]
    folder = str(Path(file).parent)
    if file in SEPARATE:
        return nodeid
    return folder if folder.startswith(SHARING) and file not in APART else file


def starts_engines(unit: str) -> bool:
    """Whether a test of this unit may start an engine of vLLM."""
    return unit.startswith(STARTING_ENGINES)


def place_of(unit: str) -> int:
    """The unit's place in the order in which units begin."""
    return LONGEST.index(unit) if unit in LONGEST else len(LONGEST) + (not starts_engines(unit))


class LongestFirst(LoadScopeScheduling):  # type: ignore[misc, unused-ignore]
    """Hands out units in the order of the collected tests (tests/cluster/conftest.py sorts them)."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        with_engines = node.gateway.id in PROCESSES_WITH_ENGINES
        preferred = (unit for unit in self.workqueue if starts_engines(unit) == with_engines)
        unit = next(preferred, None)
        if unit is not None:
            self.workqueue.move_to_end(unit, last=False)
        elif not with_engines:
            node.shutdown()  # only units that start engines are left
            return
        super()._assign_work_unit(node)
