"""Carries out a schedule: each engine in a process of its own, which imports all it needs while others still
measure on its GPUs, and begins when they have ended. What fails is recorded and stops no other."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from benchmarks.profiling.schedule import Slot, before
from benchmarks.profiling.tasks import Task
from workers.group import processes
from workers.group.jobs import last_words

POLL_S = 0.2
SLOWER, GRACE_S = 1.3, 75.0  # than expected, until the next measurement
STACKS_S = 5.0  # for aborted processes to write where they were
LEAVE_S = 3.0  # for an engine that has measured everything to end by itself


class State(Enum):
    WAITING = auto()
    PREPARING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(frozen=True)
class Ending:
    """`problem` is empty for a task that measured everything. `seconds`: that its GPUs were taken."""

    task: Task
    seconds: float
    problem: str = ""
    log: str = ""


@dataclass(frozen=True)
class Start:
    """How a slot's process is started: its command and environment, its log, and its barrier. It ends with
    its standard input, because no other process may be left to end it.

    `complete` tells whether it has measured everything, so that its cleanup is not awaited; `progress` is a
    number that changes with each measurement. It runs on `cores`; on all if there are none.
    """

    command: Sequence[str]
    environment: dict[str, str]
    log: Path
    barrier: Path
    complete: Callable[[], bool]
    progress: Callable[[], int]
    cores: frozenset[int] = frozenset()


@dataclass
class _Run:
    slot: Slot
    state: State = State.WAITING
    start: Start | None = None
    process: subprocess.Popen[bytes] | None = None
    since_s: float = 0.0
    complete_s: float = 0.0
    progress: int = 0
    progress_s: float = 0.0

    @property
    def limit_s(self) -> float:
        """Since its barrier was opened or it measured something."""
        return SLOWER * self.slot.task.longest_s + GRACE_S

    def is_stuck(self, now: float) -> bool:
        """Looks whether it has measured something meanwhile."""
        assert self.start is not None
        if (progress := self.start.progress()) != self.progress:
            self.progress, self.progress_s = progress, now
        return now - max(self.since_s, self.progress_s) > self.limit_s


def carry_out(
    slots: Sequence[Slot],
    start: Callable[[Slot, int], Start],
    budget_s: float,
    tell: Callable[[Ending], None],
) -> None:
    """`tell` of each slot's end as it comes. A slot that would not end within `budget_s` is told as not
    begun; everything has ended at `budget_s`, with what was measured until then in the files."""
    began = time.monotonic()
    lanes = _Lanes(slots, start, began + budget_s, tell)
    try:
        while lanes.go_on():
            time.sleep(POLL_S)
    finally:
        lanes.end_all("the benchmark's budget is over")


class _Lanes:
    def __init__(
        self,
        slots: Sequence[Slot],
        start: Callable[[Slot, int], Start],
        deadline: float,
        tell: Callable[[Ending], None],
    ) -> None:
        self._runs = [_Run(slot) for slot in slots]
        self._before = [before(slots, i) for i in range(len(slots))]
        self._start, self._deadline, self._tell = start, deadline, tell

    def go_on(self) -> bool:
        """Move each slot along; False when all have ended or time is over."""
        for number, run in enumerate(self._runs):
            earlier = {self._runs[i].state for i in self._before[number]}
            if run.state is State.WAITING and earlier <= {State.RUNNING, State.ENDED}:
                self._prepare(run, number)
            elif run.state is State.PREPARING and earlier <= {State.ENDED}:
                self._open(run)
            self._look_after(run)
        over = time.monotonic() > self._deadline
        return not over and any(run.state is not State.ENDED for run in self._runs)

    def _prepare(self, run: _Run, number: int) -> None:
        if self._is_too_late(run):
            return
        run.start = self._start(run.slot, number)
        with run.start.log.open("wb") as log, _on(run.start.cores):
            run.process = subprocess.Popen(
                run.start.command,
                env=run.start.environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        run.state = State.PREPARING

    def _open(self, run: _Run) -> None:
        if self._is_too_late(run):
            return
        assert run.start is not None
        run.start.barrier.touch()
        run.state, run.since_s = State.RUNNING, time.monotonic()

    def _is_too_late(self, run: _Run) -> bool:
        left_s = self._deadline - time.monotonic()
        if run.slot.task.expected_s <= left_s:
            return False
        self._end(
            run, f"not begun: {left_s:.0f} s are left and it should take {run.slot.task.expected_s:.0f}"
        )
        return True

    def _look_after(self, run: _Run) -> None:
        if run.state not in (State.PREPARING, State.RUNNING):
            return
        assert run.process is not None
        assert run.start is not None
        now = time.monotonic()
        if (code := run.process.poll()) is not None:
            self._end(run, "" if code == 0 else f"exit code {code}: {last_words(run.start.log)}")
        elif run.start.complete():
            run.complete_s = run.complete_s or now
            if now - run.complete_s > LEAVE_S:
                self._end(run, "")
        elif run.state is State.RUNNING and run.is_stuck(now):
            said = last_words(run.start.log)
            show_stacks(run.process.pid)
            self._end(run, f"measured nothing for {run.limit_s:.0f} s: {said}")

    def _end(self, run: _Run, problem: str) -> None:
        if run.process is not None:
            processes.end_session(run.process.pid)
            run.process.wait()
            assert run.process.stdin is not None
            run.process.stdin.close()
        seconds = time.monotonic() - run.since_s if run.state is State.RUNNING else 0.0
        log = run.start.log.read_text(errors="replace") if run.start and problem else ""
        run.state = State.ENDED
        self._tell(Ending(run.slot.task, seconds, problem, log))

    def end_all(self, problem: str) -> None:
        for run in self._runs:
            if run.state is not State.ENDED:
                self._end(run, problem)


def show_stacks(leader: int) -> None:
    """Have every process of a session write where it is, those started last first: they are the ranks, which
    the others wait for. `python -X faulthandler` does when it is aborted.

    One after another, for they write to one log; the others stand still meanwhile, whichever ends."""
    members = processes.in_session(leader)
    for pid in members:
        _signal(pid, signal.SIGSTOP)
    deadline = time.monotonic() + STACKS_S
    for pid in members:
        _signal(pid, signal.SIGABRT)
        _signal(pid, signal.SIGCONT)
        while pid in processes.in_session(leader) and time.monotonic() < deadline:
            time.sleep(POLL_S)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@contextlib.contextmanager
def _on(cores: frozenset[int]) -> Iterator[None]:
    """Processes begun within have these cores from their first instruction on; without any they have this
    thread's."""
    own = os.sched_getaffinity(0) if cores else frozenset()
    try:
        if cores:
            os.sched_setaffinity(0, cores)
        yield
    finally:
        if cores:
            os.sched_setaffinity(0, own)
