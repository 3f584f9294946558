"""The division of test units among processes, checked with xdist's scheduler and processes that only note."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from xdist.remote import Producer

from tests.side_by_side import (
    APART,
    LONGEST,
    SEPARATE,
    SHARING,
    STARTING_ENGINES,
    LongestFirst,
    place_of,
    unit_of,
)

ROOT = Path(__file__).parents[2]
ENGINES = [f"tests/workers/measuring/test_{name}.py::test" for name in "abcd"]
OTHERS = [f"tests/unit/test_{name}.py::test" for name in "efghij"]


class Process:
    """One of xdist's processes: notes what it is sent."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.sent: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        assert not self.shutting_down, "a process that is shutting down was sent a test"
        self.sent += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def run(processes: int, tests: list[str]) -> dict[str, list[str]]:
    """The units of each process, if each test takes as long as any other."""
    config: Any = SimpleNamespace(
        option=SimpleNamespace(loadscopereorder=False), getvalue=lambda name: [f"{processes}*popen"]
    )
    scheduler = LongestFirst(config, Producer("test", enabled=False))
    nodes: list[Any] = [Process(f"gw{number}") for number in range(processes)]
    for node in nodes:
        scheduler.add_node(node)
    for node in nodes:
        scheduler.add_node_collection(node, tests)
    scheduler.schedule()
    done = {node.gateway.id: 0 for node in nodes}
    while any(done[node.gateway.id] < len(node.sent) for node in nodes):
        for node in nodes:
            if done[node.gateway.id] < len(node.sent):
                scheduler.mark_test_complete(node, node.sent[done[node.gateway.id]])
                done[node.gateway.id] += 1
    assert all(node.shutting_down for node in nodes)
    return {node.gateway.id: [tests[index] for index in node.sent] for node in nodes}


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
@pytest.mark.parametrize("tests", [ENGINES + OTHERS, OTHERS + ENGINES, ENGINES, OTHERS], ids=str)
def test_every_test_is_run_once_and_only_two_processes_start_engines(
    processes: int, tests: list[str]
) -> None:
    ran = run(processes, tests)
    assert sorted(test for sent in ran.values() for test in sent) == sorted(tests)
    for name in set(ran) - {"gw0", "gw1"}:
        assert not set(ran[name]) & set(ENGINES)


def test_every_name_is_of_a_file_or_a_folder() -> None:
    for name in (*SHARING, *APART, *SEPARATE, *LONGEST):
        path, _, test = name.partition("::")
        assert (ROOT / path).exists(), name
        assert not test or f"def {test.partition('[')[0]}(" in (ROOT / path).read_text(), name
    for name in STARTING_ENGINES:
        assert list(ROOT.glob(f"{name}*")), name


def test_a_long_unit_begins_before_others() -> None:
    for unit in LONGEST:
        one_test = f"{unit}/test_a.py::test" if (ROOT / unit).is_dir() else unit
        assert unit_of(one_test) == unit
    assert (
        unit_of("tests/cluster/echo_engine/test_two_hosts.py::test")
        == "tests/cluster/echo_engine/test_two_hosts.py"
    )
    engine, other = unit_of(ENGINES[0]), unit_of(OTHERS[0])
    assert max(map(place_of, LONGEST)) < place_of(engine) < place_of(other)
