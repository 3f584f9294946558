"""One of several controllers on one store acts; real processes are stopped and killed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane import errors
from controlplane.controller import leadership
from controlplane.controller.leadership import Leadership, LeasedStore, is_gone, this_process
from controlplane.state import Fenced, StateStore, Write
from controlplane.state.stores import open_store
from testkit.loops import until

ROOT = Path(__file__).parents[3]


class Counting:
    """In place of a controller: it commits one number after the other, with the epoch of its lease."""

    def __init__(self, store: StateStore) -> None:
        self.store = store
        self.committed = 0

    async def run(self) -> None:
        while True:
            await self.step()
            await asyncio.sleep(0.001)

    async def step(self) -> None:
        with contextlib.suppress(errors.Unavailable, errors.StaleWrite, Fenced):
            self.count()

    def count(self) -> None:
        last = int(entry.value) if (entry := self.store.get("model", "count")) else 0
        assert isinstance(self.store, LeasedStore)
        key = f"{self.store._lease.epoch:020d}"
        number = Write("model", "count", str(last + 1), entry.version if entry else 0)
        self.store.commit([number, Write("deployment", f"{last + 1}", key, 0)])
        self.committed += 1


class Contender:
    def __init__(self, store: StateStore) -> None:
        self.told: list[bool] = []
        self.made: list[Counting] = []
        self.leadership = Leadership(store, self._make, self.told.append)
        self.task = asyncio.create_task(self.leadership.run())

    def _make(self, store: StateStore) -> Any:
        self.made.append(Counting(store))
        return self.made[-1]

    @property
    def leads(self) -> bool:
        return bool(self.told) and self.told[-1]

    async def end(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(leadership, "RENEW_S", 0.02)
    monkeypatch.setattr(leadership, "TRY_S", 0.01)
    return monkeypatch


def epochs(store: StateStore) -> list[str]:
    """The holders of the commits, in their order."""
    entries = store.snapshot(["deployment"]).entries["deployment"]
    return [entry.value for _, entry in sorted(entries.items(), key=lambda item: item[1].version)]


async def test_one_controller_acts_and_the_next_acts_when_the_first_ends(
    store: StateStore, quick: pytest.MonkeyPatch
) -> None:
    first = Contender(store)
    await until(lambda: first.leads and first.made[0].committed > 3)
    second = Contender(store)
    await until(lambda: second.leadership._other != "")
    await until(lambda: first.made[0].committed > 20)
    assert not second.made
    await first.end()
    assert first.told == [False, True, False]
    await until(lambda: second.leads and second.made[0].committed > 3)
    await second.end()
    found = epochs(store)
    assert found == sorted(found)
    assert len(set(found)) == 2


def test_a_controller_with_an_expired_lease_neither_reads_nor_commits(store: StateStore) -> None:
    """The process was stopped: its time is over before it can know."""
    held = LeasedStore(
        store, store.take_lease(leadership.NAME, "a", 60), time.clock_gettime(time.CLOCK_BOOTTIME) + 60
    )
    held.commit([Write("model", "a", "1", 0)])
    held.until_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    uses: list[Callable[[], Any]] = [
        held.revision,
        lambda: held.snapshot(["model"]),
        lambda: held.changes(["model"], 0),
        lambda: held.get("model", "a"),
        lambda: held.commit([Write("model", "a", "2", None)]),
    ]
    for use in uses:
        with pytest.raises(errors.Unavailable, match="ran out"):
            use()
    assert store.revision() == 1


async def test_without_the_store_running_actions_continue_and_none_begins(
    store: StateStore, quick: pytest.MonkeyPatch
) -> None:
    asked = 0

    def away(*given: Any) -> Any:
        nonlocal asked
        asked += 1
        raise errors.Unavailable("the state store does not answer")

    first = Contender(store)
    await until(lambda: first.leads)
    with quick.context() as context:
        context.setattr(store, "take_lease", away)
        await until(lambda: asked > 3)
        held = first.made[0].store
        assert isinstance(held, LeasedStore)
        held.until_s = 0.0
        count = first.made[0].committed
        more = asked
        await until(lambda: asked > more + 3)
        assert first.leads
        assert first.made[0].committed == count
    await until(lambda: first.made[0].committed > count)
    assert len(first.made) == 1
    await first.end()


async def test_a_fenced_controller_starts_again_with_another_epoch(
    store: StateStore, quick: pytest.MonkeyPatch
) -> None:
    first = Contender(store)
    await until(lambda: first.leads)
    holder = first.made[0].store._lease.holder  # type: ignore[attr-defined]
    other = store.take_lease(leadership.NAME, "other", 60, gone=holder)
    await until(lambda: not first.leads)
    store.release_lease(other)
    await until(lambda: first.leads)
    epochs_of = [made.store._lease.epoch for made in first.made]  # type: ignore[attr-defined]
    assert len(epochs_of) == 2
    assert epochs_of[0] < other.epoch < epochs_of[1]
    await first.end()


async def test_a_store_that_lost_the_lease_is_named_as_the_cause(
    store: StateStore, tmp_path: Path, quick: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The controller takes the lease again at once: no other process has it."""
    for _ in range(2):  # an empty store counts epochs from the beginning
        store.release_lease(store.take_lease(leadership.NAME, "before", 60))
    first = Contender(store)
    await until(lambda: first.leads)
    with contextlib.closing(sqlite3.connect(tmp_path / "state.db")) as db, db:
        db.execute("DELETE FROM leases")
    with caplog.at_level(logging.INFO, leadership.log.name):
        await until(lambda: len(first.made) == 2 and first.leads)
    await first.end()
    assert "the store was emptied or replaced" in caplog.text
    assert "stands by" not in caplog.text


async def test_a_controller_that_ends_ends_its_leadership(
    store: StateStore, quick: pytest.MonkeyPatch
) -> None:
    """The process ends so that its supervisor replaces it."""

    class Broken:
        def __init__(self, store: StateStore) -> None: ...

        async def run(self) -> None:
            raise ValueError("a fault")

    broken: Any = Broken
    with pytest.raises(RuntimeError, match="the controller ended"):
        await Leadership(store, broken).run()

    class Cancelled(Broken):
        """Another task cancelled what the controller waited for."""

        async def run(self) -> None:
            raise asyncio.CancelledError

    cancelled: Any = Cancelled
    with pytest.raises(RuntimeError, match="the controller ended"):
        await Leadership(store, cancelled).run()


def test_a_process_is_identified_by_its_id_and_start_time() -> None:
    assert not is_gone(this_process())
    assert not is_gone(f"{this_process()} more")
    assert not is_gone("")
    assert not is_gone("another-machine pid:[1] 1 1")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        boot, namespace, _, _ = this_process().split()
        known = f"{boot} {namespace} {other.pid} {leadership._started(other.pid)}"
        assert not is_gone(known)
        assert is_gone(f"{boot} {namespace} {other.pid} 1")  # the number was another's before
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert is_gone(known)  # not reaped yet
    assert is_gone(known)


async def test_a_controller_without_file_descriptors_keeps_trying(
    store: StateStore, quick: pytest.MonkeyPatch
) -> None:
    """As with too many open files (EMFILE): the loop does not end, and no other controller counts as gone."""
    first = Contender(store)
    await until(lambda: first.leads)
    second = Contender(store)
    await until(lambda: second.leadership._other != "")
    full, asked = OSError(errno.EMFILE, "Too many open files"), 0

    def refused(*given: Any, **named: Any) -> Any:
        nonlocal asked
        asked += 1
        raise full

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_text", refused)
        patch.setattr(store, "take_lease", refused)
        await until(lambda: asked > 20)
        assert not first.task.done()
        assert not second.task.done()
        assert not second.leads
        with pytest.raises(OSError, match="Too many"):
            is_gone(first.leadership._process)
    await first.end()
    await until(lambda: second.leads)
    await second.end()


# --- processes -----------------------------------------------------------------------------------

ACT = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from test_leadership import Counting
from controlplane.controller import leadership
from controlplane.state.stores import open_store
leadership.LEASE_S, leadership.RENEW_S, leadership.TRY_S = float(sys.argv[3]), 0.1, 0.05
tell = lambda leads: print(int(leads), flush=True)
asyncio.run(leadership.Leadership(open_store(sys.argv[1]), Counting, tell).run())
"""


class Process:
    def __init__(self, url: str, lease_s: float) -> None:
        arguments = (sys.executable, "-c", ACT, url, str(Path(__file__).parent), str(lease_s))
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)

    def tells(self) -> bool:
        """The next time that it takes or loses the lease."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "it ended"
        return bool(int(line))

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[[float], Process]]:
    begun: list[Process] = []

    def one(lease_s: float) -> Process:
        begun.append(Process(f"sqlite://{tmp_path}/s.db", lease_s))
        assert not begun[-1].tells()
        return begun[-1]

    yield one
    for process in begun:
        process.end()


def stopped_between_commits(of: Process, file: Path) -> bool:
    """Whether the process was stopped. A process that is stopped within a commit keeps SQLite's lock, so no
    other can write: then it is continued."""
    of.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, of.process.pid, os.WSTOPPED)  # a signal takes effect somewhat later
    with contextlib.closing(sqlite3.connect(file, timeout=0.5, isolation_level=None)) as db:
        try:
            db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            of.process.send_signal(signal.SIGCONT)
            return False
        db.execute("ROLLBACK")
        return True


@pytest.mark.slow
async def test_a_killed_controller_is_succeeded_at_once(
    begin: Callable[[float], Process], tmp_path: Path
) -> None:
    first = begin(10_000.0)
    assert first.tells()
    second = begin(10_000.0)
    first.process.kill()
    assert second.tells()


@pytest.mark.slow
async def test_a_stopped_controller_is_succeeded_and_commits_nothing_later(
    begin: Callable[[float], Process], tmp_path: Path
) -> None:
    first, second = begin(1.0), None
    assert first.tells()
    store = open_store(f"sqlite://{tmp_path}/s.db")
    await until(lambda: len(epochs(store)) > 10)
    second = begin(1.0)
    await until(lambda: stopped_between_commits(first, tmp_path / "s.db"))
    assert second.tells()
    await until(lambda: len(set(epochs(store))) == 2)
    first.process.send_signal(signal.SIGCONT)
    assert not first.tells()
    count = len(epochs(store))
    await until(lambda: len(epochs(store)) > count + 10)
    found = epochs(store)
    store.close()
    assert found == sorted(found), "the first one wrote after the second"


def test_a_commit_with_a_lost_lease_is_refused(store: StateStore) -> None:
    lease = store.take_lease(leadership.NAME, "a", 60)
    held = LeasedStore(store, lease, float("inf"))
    held.commit([Write("model", "a", "1", 0)])
    store.take_lease(leadership.NAME, "b", 60, gone="a")
    with pytest.raises(Fenced):
        held.commit([Write("model", "a", "2", None)])
