"""Which tests run side by side when several processes run them (`make test`).

A unit is what one process runs in a row: a folder whose tests share what takes long to make, or a file.
Only the first two processes start engines: each may need 8 GiB. The others take what starts none,
among it the clusters whose engines echo; when no engine is to be started any more, the first two help them.
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
PROCESSES_WITH_ENGINES = ("gw0", "gw1")


def unit_of(nodeid: str) -> str:
    """The folder or the file that a test is run with."""
    file = nodeid.partition("::")[0]
    folder = str(Path(file).parent)
    return folder if folder.startswith(SHARING) else file


def starts_engines(unit: str) -> bool:
    """Whether a test of this unit may start an engine of vLLM."""
    return unit.startswith(STARTING_ENGINES)


class FoldersAndFiles(LoadScopeScheduling):  # type: ignore[misc, unused-ignore]
    """Hands out units. What starts engines goes first, for the longest units are among it."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        with_engines = node.gateway.id in PROCESSES_WITH_ENGINES
        preferred = (unit for unit in self.workqueue if starts_engines(unit) == with_engines)
        unit = next(preferred, None)
        if unit is not None:
            self.workqueue.move_to_end(unit, last=False)
        elif not with_engines:
            node.shutdown()  # only what starts engines is left
            return
        super()._assign_work_unit(node)
