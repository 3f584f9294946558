"""Processes that end with their parent, and what is unlinked of what they shared."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import psutil
import pytest

from workers.group import processes

MAPS = """\
7f0000000000-7f0000001000 r-xp 00000000 08:01 12 /usr/lib/libc.so.6
7f0000001000-7f0000002000 rw-s 00000000 00:1a 13 /dev/shm/vllm_dist_ab-tp:0-[0-1]-cpushm_0
7f0000002000-7f0000003000 rw-s 00000000 00:1a 14 /dev/shm/psm_1234
7f0000003000-7f0000004000 rw-p 00000000 00:00 0
"""


def test_only_segments_of_vllms_collectives_are_ours_to_unlink() -> None:
    assert processes.segments(MAPS) == {Path("/dev/shm/vllm_dist_ab-tp:0-[0-1]-cpushm_0")}


def _child(tell: Connection) -> None:
    processes.die_with_parent()
    tell.send(os.getpid())
    time.sleep(120)


def _parent(method: Literal["spawn", "fork"], tell: Connection) -> None:
    processes.die_with_parent()  # as an engine's core, which starts or forks its ranks
    context = (
        multiprocessing.get_context("fork") if method == "fork" else multiprocessing.get_context("spawn")
    )
    child = context.Process(target=_child, args=(tell,))
    child.start()
    time.sleep(120)


@pytest.fixture(params=["spawn", "fork"])
def family(request: pytest.FixtureRequest) -> Iterator[tuple[psutil.Process, psutil.Process]]:
    """A process and its child, which has to end with it."""
    here, there = multiprocessing.Pipe()
    parent = multiprocessing.get_context("spawn").Process(target=_parent, args=(request.param, there))
    parent.start()
    assert here.poll(60), "the child did not start"
    child = psutil.Process(here.recv())
    yield psutil.Process(parent.pid), child
    parent.kill()
    parent.join()


@pytest.mark.slow  # three interpreters
def test_a_child_ends_when_its_parent_is_killed(family: tuple[psutil.Process, psutil.Process]) -> None:
    parent, child = family
    parent.send_signal(signal.SIGKILL)
    assert not psutil.wait_procs([child], timeout=60)[1]


@pytest.mark.slow
def test_all_descendants_are_ended_but_for_resource_trackers(
    family: tuple[psutil.Process, psutil.Process],
) -> None:
    found = processes.children()
    assert set(family) <= found
    assert not any("resource_tracker" in part for p in found for part in p.cmdline())
    processes.end(family)
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family)


LEADER = """
import subprocess, sys, time
from multiprocessing.shared_memory import SharedMemory
made = SharedMemory(create=True, size=4096)
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(120)"])
print(made.name, child.pid, flush=True)
time.sleep(120)
"""


def test_a_session_ends_with_what_its_processes_shared() -> None:
    """Python's resource tracker, of the same session, takes the memory away once it is left alone."""
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert leader.stdout is not None
    name, child = leader.stdout.readline().split()
    shared = Path("/dev/shm") / name
    assert shared.exists()
    assert {leader.pid, int(child)} == set(processes.in_session(leader.pid))
    processes.end_session(leader.pid)
    assert leader.wait(0) == -signal.SIGKILL
    assert processes.in_session(leader.pid) == []
    leader.stdout.read()  # until the tracker, which has the other end, has ended
    assert not shared.exists()
    leader.stdout.close()
