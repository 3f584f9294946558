"""The promises of every state store, on real SQLite files and a real Redis."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import socketserver
import sqlite3
import stat
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from controlplane.errors import InvalidRequest, StaleWrite, Unavailable
from controlplane.state import Changes, Entry, Fenced, Lease, StateStore, Write
from controlplane.state import redis as redis_module
from controlplane.state import sqlite as sqlite_module
from controlplane.state.records import Model, Phase, dump
from controlplane.state.redis import RedisStore
from controlplane.state.repository import Delete, Put, Repository
from controlplane.state.sqlite import SqliteStore
from controlplane.state.stores import open_store

pytestmark = pytest.mark.slow  # a real Redis, several processes, kill -9

ROOT = Path(__file__).parents[2]
KINDS = ("model", "deployment")


def put(key: str, value: str, expected: int | None = None, kind: str = "model") -> Write:
    return Write(kind, key, value, expected)


def contents(store: StateStore) -> dict[str, dict[str, Entry]]:
    return {kind: dict(entries) for kind, entries in store.snapshot(KINDS).entries.items()}


def child(script: str, *arguments: str) -> subprocess.Popen[str]:
    """Another process with the project on its path."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def answers(children: list[subprocess.Popen[str]]) -> list[str]:
    """What processes print that all begin once each is ready."""
    for process in children:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in children:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return [process.communicate(timeout=90)[0] for process in children]


# --- compare and set -----------------------------------------------------------------------------


def test_a_new_store_is_empty(store: StateStore) -> None:
    assert store.revision() == 0
    assert store.get("model", "a") is None
    assert contents(store) == {"model": {}, "deployment": {}}
    assert store.snapshot(()).entries == {}


def test_a_commit_is_read_back_with_its_revision_as_version(store: StateStore) -> None:
    revision = store.commit([put("a", "1", 0)])
    assert store.get("model", "a") == Entry("1", revision)
    assert store.revision() == revision == store.snapshot(KINDS).revision
    assert store.get("deployment", "a") is None


@pytest.mark.parametrize("expected", [0, 1, 3, 2**40])
def test_a_wrong_expectation_writes_nothing(store: StateStore, expected: int) -> None:
    store.commit([put("other", "x")])
    store.commit([put("a", "1", 0)])
    before = contents(store)
    with pytest.raises(StaleWrite, match="model 'a' is at version 2, expected") as raised:
        store.commit([put("a", "2", expected)])
    assert raised.value.details == {"kind": "model", "key": "a", "version": 2}
    assert contents(store) == before
    assert store.revision() == 2


def test_a_version_is_expected_of_something_absent(store: StateStore) -> None:
    with pytest.raises(StaleWrite, match="at version 0, expected 1"):
        store.commit([put("a", "1", 1)])
    with pytest.raises(StaleWrite):
        store.commit([Write("model", "a", None, 1)])


def test_the_right_version_and_none_write(store: StateStore) -> None:
    first = store.commit([put("a", "1", 0)])
    second = store.commit([put("a", "2", first)])
    third = store.commit([put("a", "3", None)])
    assert first < second < third
    assert store.get("model", "a") == Entry("3", third)


def test_a_commit_applies_all_writes_or_none(store: StateStore) -> None:
    store.commit([put("a", "1"), put("b", "1")])
    before = contents(store)
    writes = [
        put("a", "2", 1),
        put("c", "2", 0, "deployment"),
        Write("model", "b", None, None),
        put("b", "2", 7),
    ]
    with pytest.raises(StaleWrite, match="'b'"):
        store.commit(writes)
    assert contents(store) == before
    revision = store.commit(writes[:3])
    assert contents(store) == {
        "model": {"a": Entry("2", revision)},
        "deployment": {"c": Entry("2", revision)},
    }


def test_writes_of_one_entry_are_checked_first_and_the_last_wins(store: StateStore) -> None:
    revision = store.commit([put("a", "1", 0), put("a", "2", 0)])
    assert store.get("model", "a") == Entry("2", revision)
    with pytest.raises(StaleWrite):
        store.commit([Write("model", "a", None, revision), put("a", "3", 0)])


def test_a_deleted_entry_is_gone(store: StateStore) -> None:
    first = store.commit([put("a", "1", 0)])
    with pytest.raises(StaleWrite):
        store.commit([Write("model", "a", None, first + 1)])
    deleted = store.commit([Write("model", "a", None, first)])
    assert store.get("model", "a") is None
    assert deleted == first + 1
    # Deleting what is absent is no error, and a key's versions go on after it was deleted.
    absent = store.commit([Write("model", "a", None, None), Write("model", "b", None, 0)])
    assert store.commit([put("a", "2", 0)]) == absent + 1
    with pytest.raises(StaleWrite):
        store.commit([put("a", "3", first)])


def test_an_empty_commit_changes_nothing(store: StateStore) -> None:
    assert store.commit([]) == 0
    revision = store.commit([put("a", "1")])
    assert store.commit([]) == revision == store.revision()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("Größe/模型 🎼:{a}", '"\u2028é\x00\U0001f3bc"'),
        ("", ""),
        ("12:34", "56:78"),
        ("a\x00b\n", "\r\n$5\r\n"),
        ("'; DROP TABLE entries; --", "%s ? :a"),
        ("large", "é" * 3_000_000),
    ],
    ids=["unicode", "empty", "colons", "control", "sql", "large"],
)
def test_any_text_is_kept(store: StateStore, key: str, value: str) -> None:
    revision = store.commit([put(key, value, 0)])
    assert store.get("model", key) == Entry(value, revision)
    assert contents(store)["model"] == {key: Entry(value, revision)}


def test_a_commit_of_many_writes(store: StateStore) -> None:
    store.commit([put(f"k{i}", str(i), 0) for i in range(2000)])
    assert len(contents(store)["model"]) == 2000
    assert store.revision() == 1


# --- changes -------------------------------------------------------------------------------------


def test_changes_since_a_revision(store: StateStore) -> None:
    first = store.commit([put("a", "1"), put("b", "1"), put("c", "1", None, "deployment")])
    second = store.commit([put("a", "2"), Write("model", "b", None, None), put("x", "1", None, "other")])
    assert store.changes(KINDS, first) == Changes(second, {"model": {"a": Entry("2", second), "b": None}})
    assert store.changes(KINDS, second) == Changes(second, {})
    third = store.commit([put("b", "3", 0)])
    assert store.changes(KINDS, second) == Changes(third, {"model": {"b": Entry("3", third)}})
    assert store.changes(["deployment"], first) == Changes(third, {})
    assert store.changes(KINDS, third + 1) is None  # another's history


def test_pages_have_all_that_is_there_all_the_time(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are deleted as they come, too, as who looks through old ones does."""
    for module in ("redis", "sqlite"):
        monkeypatch.setattr(f"controlplane.state.{module}.PAGE", 7)
    keys = {"", *(f"key {n}" for n in range(700))}  # a hash of few Redis has in one page
    writes = [put(key, f'"{key}"') for key in sorted(keys)]
    version = store.commit([*writes, put("x", "1", None, "deployment")])
    pages = 0
    found: dict[str, Entry] = {}
    for page in store.pages("model"):
        pages += 1
        found |= page
        store.commit([Write("model", key, None, None) for key in page if key.endswith("3")])
    assert found == {key: Entry(f'"{key}"', version) for key in keys}
    assert pages > 20
    assert set(store.snapshot(["model"]).entries["model"]) == {key for key in keys if key[-1:] != "3"}
    assert not any(store.pages("none"))


def test_changes_of_a_store_that_is_far_ahead_are_not_known(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_module, "KEPT_DELETIONS", 5)
    monkeypatch.setattr(redis_module, "KEPT_CHANGES", 5)
    for number in range(12):
        store.commit([put(f"k{number}", "1")])
        store.commit([Write("model", f"k{number - 1}", None, None)])
    assert store.changes(KINDS, 0) is None
    known = store.changes(KINDS, 21)
    assert known is not None
    assert known.entries["model"] == {"k9": None, "k10": None, "k11": Entry("1", 23)}


def older_commit(url: str, key: str, value: str | None) -> None:
    """Software of before the changes would write this."""
    if url.startswith("sqlite"):
        with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite://"))) as db, db:
            db.execute("UPDATE revision SET value = value + 1")
            if value is None:
                db.execute("DELETE FROM entries WHERE kind = 'model' AND key = ?", (key,))
            else:
                row = "INSERT OR REPLACE INTO entries SELECT 'model', ?, ?, value FROM revision"
                db.execute(row, (key, value))
        return
    address, _, prefix = url.partition("&prefix=")
    with redis.Redis.from_url(address) as client:
        revision = client.incr(f"{{{prefix}}}:revision")
        if value is None:
            client.hdel(f"{{{prefix}}}:entries:model", key)
        else:
            client.hset(f"{{{prefix}}}:entries:model", key, f"{revision}:{value}")


def test_writes_of_older_software_are_seen(url: str) -> None:
    store = open_store(url)
    repository = Repository(store)
    for number, name in enumerate(("a", "b", "c")):
        model = Model(name, 1, Phase.READY)
        older_commit(url, name, dump(model))
        assert repository.read().models[name].record == model
        if number:
            repository.commit([Put(replace(model, uid=2), None)])
            assert repository.read().models[name].record.uid == 2
    older_commit(url, "a", None)
    assert set(repository.read().models) == {"b", "c"}
    repository.commit([Delete(Model, "b", None)])
    older_commit(url, "d", dump(Model("d", 1, Phase.READY)))
    repository.commit([Put(Model("e", 1, Phase.READY), 0)])
    assert set(repository.read().models) == {"c", "d", "e"}
    store.close()


# --- leases --------------------------------------------------------------------------------------


def test_a_lease_belongs_to_one_holder_until_it_is_released(store: StateStore) -> None:
    mine = store.take_lease("controller", "a", 60)
    assert (mine.name, mine.holder) == ("controller", "a")
    assert store.take_lease("controller", "b", 60) == mine
    assert store.take_lease("controller", "a", 60) == mine
    assert store.take_lease("other", "b", 60).holder == "b"
    store.release_lease(Lease("controller", "b", mine.epoch))
    assert store.take_lease("controller", "b", 60) == mine
    store.release_lease(mine)
    next_one = store.take_lease("controller", "b", 60)
    assert next_one.holder == "b"
    assert next_one.epoch > mine.epoch
    assert store.revision() == 0


def test_an_expired_or_abandoned_lease_goes_to_another_holder(store: StateStore) -> None:
    mine = store.take_lease("controller", "a", 60)
    assert store.take_lease("controller", "b", 0.001, gone="c") == mine
    second = store.take_lease("controller", "b", 0.001, gone="a")
    assert (second.holder, second.epoch > mine.epoch) == ("b", True)
    deadline = time.monotonic() + 60
    while (third := store.take_lease("controller", "c", 60)).holder != "c":
        assert time.monotonic() < deadline
    assert third.epoch > second.epoch


def test_only_the_lease_s_holder_commits_with_it(store: StateStore) -> None:
    mine = store.take_lease("controller", "a", 0.001)
    time.sleep(0.002)
    assert store.commit([put("a", "1")], mine) == 1  # it ran out, and no process took it
    deadline = time.monotonic() + 60
    while (other := store.take_lease("controller", "b", 60)).holder != "b":
        assert time.monotonic() < deadline
    for late in (mine, Lease("controller", "a", other.epoch), Lease("controller", "b", mine.epoch)):
        with pytest.raises(Fenced, match=f"{late.holder} no longer holds the lease 'controller'"):
            store.commit([put("a", "2"), put("b", "2")], late)
    with pytest.raises(Fenced):
        store.commit([put("a", "2", 99)], Lease("never", "a", 1))
    assert contents(store)["model"] == {"a": Entry("1", 1)}
    assert store.commit([put("a", "2")], other) == 2
    assert store.commit([put("a", "3")]) == 3


TAKE = """
import sys
from controlplane.state.stores import open_store
store = open_store(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print(store.take_lease("controller", sys.argv[2], 60).holder)
"""


def test_one_of_several_processes_gets_a_lease(url: str) -> None:
    open_store(url).close()
    children = [child(TAKE, url, name) for name in "pqr"]
    assert len(set(answers(children))) == 1


def test_entries_are_there_after_closing(url: str) -> None:
    first = open_store(url)
    revision = first.commit([put("a", "1", 0)])
    first.close()
    second = open_store(url)
    assert second.get("model", "a") == Entry("1", revision)
    assert second.revision() == revision
    second.close()


# --- several threads and processes ---------------------------------------------------------------


def test_a_snapshot_never_sees_half_a_commit(url: str, store: StateStore) -> None:
    stop = threading.Event()

    def writer() -> int:
        count = 0
        while not stop.is_set():
            count += 1
            store.commit([put("a", str(count)), put("b", str(count), None, "deployment")])
        return count

    reader = open_store(url)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(writer)
        revisions: list[int] = []
        deadline = time.monotonic() + 60
        try:
            while time.monotonic() < deadline and (len(revisions) < 200 or len(set(revisions)) < 6):
                snapshot = reader.snapshot(KINDS)
                revisions.append(snapshot.revision)
                a, b = snapshot.entries["model"].get("a"), snapshot.entries["deployment"].get("b")
                assert a == b
                assert (a.version if a else 0) == snapshot.revision
        finally:
            stop.set()
        assert writing.result() == store.revision() > 5
    reader.close()
    assert revisions == sorted(revisions)
    assert len(set(revisions)) > 3


def increment(store: StateStore, times: int) -> list[int]:
    versions: list[int] = []
    while len(versions) < times:
        entry = store.get("model", "count") or Entry("0", 0)
        try:
            versions.append(store.commit([put("count", str(int(entry.value) + 1), entry.version)]))
        except StaleWrite:
            continue
    return versions


def test_concurrent_increments_lose_nothing(store: StateStore) -> None:
    threads, times = 6, 20
    with ThreadPoolExecutor(threads) as pool:
        versions = list(pool.map(lambda _: increment(store, times), range(threads)))
    assert store.get("model", "count") == Entry(str(threads * times), threads * times)
    assert all(seen == sorted(seen) for seen in versions)
    assert sorted(version for seen in versions for version in seen) == list(range(1, threads * times + 1))


CREATE = """
import sys
from controlplane.errors import StaleWrite
from controlplane.state import Write
from controlplane.state.stores import open_store
url, name = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
store = open_store(url)  # also the first opening of a new file is a race
won = []
for i in range(150):
    try:
        store.commit([Write("model", f"key{i}", name, 0)])
        won.append(i)
    except StaleWrite:
        pass
print(won)
"""


def test_exactly_one_of_two_processes_that_create_a_key_wins(url: str) -> None:
    children = [child(CREATE, url, name) for name in ("p", "q")]
    won = [json.loads(answer) for answer in answers(children)]
    assert sorted(won[0] + won[1]) == list(range(150))
    store = open_store(url)
    entries = store.snapshot(["model"]).entries["model"]
    store.close()
    assert {key: entry.value for key, entry in entries.items()} == {
        f"key{i}": name for name, keys in zip("pq", won, strict=True) for i in keys
    }


# --- crashes -------------------------------------------------------------------------------------

COMMIT_FOR_EVER = """
import itertools, sys
from controlplane.state import Write
from controlplane.state.stores import open_store
store = open_store(sys.argv[1])
for i in itertools.count(1):
    store.commit([Write("model", f"a{i}", "x" * 500, 0), Write("deployment", f"b{i}", "x" * 500, 0)])
    print(i, flush=True)
"""


def acknowledged_before_kill(url: str, victim: Callable[[subprocess.Popen[str]], Any], least: int) -> int:
    """Let a child commit; kill the victim after `least` acks; the last ack that came through."""
    process = child(COMMIT_FOR_EVER, url)
    assert process.stdout is not None
    last = 0
    for line in process.stdout:
        last = int(line)
        if last == least:
            victim(process)
    process.wait(60)
    return last


def assert_all_there(store: StateStore, last: int) -> None:
    """Each acknowledged commit, at most one more, and no half of any."""
    entries = store.snapshot(KINDS)
    count = entries.revision
    assert last <= count <= last + 1
    numbers = range(1, count + 1)
    assert set(entries.entries["model"]) == {f"a{i}" for i in numbers}
    assert set(entries.entries["deployment"]) == {f"b{i}" for i in numbers}


@pytest.mark.parametrize("least", [1, 40])
def test_acknowledged_commits_survive_kill_9_of_the_writer(url: str, least: int) -> None:
    last = acknowledged_before_kill(url, lambda process: process.send_signal(signal.SIGKILL), least)
    store = open_store(url)
    assert last >= least
    assert_all_there(store, last)
    assert store.commit([put("after", "1", 0)]) == store.revision()
    store.close()


def test_acknowledged_commits_survive_kill_9_of_redis(
    start_redis: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_redis()
    survivor = open_store(server.url)
    last = acknowledged_before_kill(server.url, lambda _: server.kill(), 40)
    assert last >= 40
    tried: list[object] = []
    connect = socket.socket.connect

    def counted(self: socket.socket, address: Any) -> None:
        tried.append(address)
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", counted)
    for use in (survivor.revision, lambda: survivor.commit([put("x", "1")]), lambda: open_store(server.url)):
        with pytest.raises(Unavailable) as raised:
            use()
        assert raised.value.retry_after_s
    monkeypatch.undo()
    assert len(tried) == 3, "a refused connection is an answer, not to be tried again"
    server.start()
    assert_all_there(survivor, last)
    survivor.close()


def test_a_redis_that_hangs_is_unavailable_after_the_timeout(start_redis: Callable[..., Any]) -> None:
    server = start_redis()
    store = RedisStore(server.url, timeout_s=0.3)
    store.commit([put("a", "1")])  # the server knows the script from here on
    server.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(Unavailable, match="may have been applied"):
            store.commit([put("a", "2")])  # returns while the server is stopped
    finally:
        server.process.send_signal(signal.SIGCONT)
    store.close()
    # The commit was waiting in the server's socket: the message was right.
    assert revision_after(server.url, 1) == 2


def revision_after(url: str, before: int) -> int:
    """The first revision beyond `before`, of a server that may be too busy with its disk to answer yet."""
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(Unavailable), contextlib.closing(open_store(url)) as store:
            if (revision := store.revision()) > before:
                return revision
        assert time.monotonic() < deadline, f"still at revision {before}"
        time.sleep(0.05)


class LosesAnAnswer(socketserver.BaseRequestHandler):
    """Between a client and Redis; hangs up once instead of passing on a script's answer."""

    port: int
    losing = False

    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.port)) as server:
            while request := self.request.recv(65536):
                server.sendall(request)
                answer = server.recv(65536)
                if b"EVALSHA" in request and type(self).losing:
                    type(self).losing = False
                    return
                self.request.sendall(answer)


def test_a_commit_with_a_lost_answer_is_not_sent_again(redis_url: str) -> None:
    port = redis.Redis.from_url(redis_url).connection_pool.connection_kwargs["port"]
    handler = type("Handler", (LosesAnAnswer,), {"port": port})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as proxy:
        proxy.daemon_threads = True
        threading.Thread(target=proxy.serve_forever, args=(0.02,), daemon=True).start()
        store = open_store(f"redis://127.0.0.1:{proxy.server_address[1]}/0?prefix=lost-{uuid.uuid4().hex}")
        store.commit([put("a", "1")])
        handler.losing = True  # type: ignore[attr-defined]
        with pytest.raises(Unavailable, match="may have been applied"):
            store.commit([put("a", "2")])
        assert store.get("model", "a") == Entry("2", 2)
        store.close()
        proxy.shutdown()


# --- any sequence of calls does what a dict would ------------------------------------------------

KEYS = st.sampled_from(["a", "b", "ü"])
EXPECTED = st.sampled_from(["any", "right", "absent", "wrong"])
CHANGES = st.lists(
    st.tuples(st.sampled_from(KINDS), KEYS, st.none() | st.text(max_size=5), EXPECTED), max_size=4
)


class DictMachine(RuleBasedStateMachine):
    """Runs the same commits on a store and on a plain dict."""

    url: str

    def __init__(self) -> None:
        super().__init__()
        name = uuid.uuid4().hex
        is_file = self.url.startswith("sqlite")
        self.own = f"{self.url}.{name}" if is_file else f"{self.url}-{name}"
        self.store = open_store(self.own)
        self.model: dict[tuple[str, str], Entry] = {}
        self.followed: dict[tuple[str, str], Entry] = {}  # by what changes tell
        self.followed_to = 0
        self.revision = 0

    def teardown(self) -> None:
        self.store.close()

    def version(self, kind: str, key: str) -> int:
        entry = self.model.get((kind, key))
        return entry.version if entry else 0

    def expectation(self, kind: str, key: str, expected: str) -> int | None:
        current = self.version(kind, key)
        return {"any": None, "right": current, "absent": 0, "wrong": current + 1}[expected]

    @rule(changes=CHANGES)
    def commit(self, changes: list[tuple[str, str, str | None, str]]) -> None:
        writes = [
            Write(kind, key, value, self.expectation(kind, key, expected))
            for kind, key, value, expected in changes
        ]
        if any(w.expected_version not in {None, self.version(w.kind, w.key)} for w in writes):
            with pytest.raises(StaleWrite):
                self.store.commit(writes)
            return
        self.revision += bool(writes)
        assert self.store.commit(writes) == self.revision
        for write in writes:
            self.model.pop((write.kind, write.key), None)
            if write.value is not None:
                self.model[write.kind, write.key] = Entry(write.value, self.revision)

    @rule(kind=st.sampled_from(KINDS), key=KEYS)
    def get(self, kind: str, key: str) -> None:
        assert self.store.get(kind, key) == self.model.get((kind, key))

    @rule()
    def follow(self) -> None:
        changes = self.store.changes(KINDS, self.followed_to)
        assert changes is not None
        assert changes.revision == self.revision
        for kind, entries in changes.entries.items():
            for key, entry in entries.items():
                self.followed.pop((kind, key), None)
                if entry is not None:
                    self.followed[kind, key] = entry
        assert self.followed == self.model
        assert not any(changes.entries.values()) or self.followed_to < self.revision
        self.followed_to = self.revision

    @rule()
    def open_again(self) -> None:
        self.store.close()
        self.store = open_store(self.own)

    @invariant()
    def same(self) -> None:
        snapshot = self.store.snapshot(KINDS)
        found = {(kind, key): e for kind, entries in snapshot.entries.items() for key, e in entries.items()}
        assert (snapshot.revision, found) == (self.revision, self.model)


def test_the_store_behaves_like_a_dict(url: str) -> None:
    open_store(url).close()  # makes the folder
    machine = type("Machine", (DictMachine,), {"url": url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=12,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


# --- URLs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        *("", "nonsense", "postgres://user:secret@host/db", "sqlite", "sqlite://", "sqlite://relative.db"),
        *("sqlite:///", "sqlite:///folder/", "sqlite:///a.db?mode=ro"),
        *("redis://127.0.0.1:1/name", "redis://127.0.0.1:port/0", "redis://127.0.0.1:1/0?prefix=a{b}"),
        *("redis://127.0.0.1:1/0?prefix=", "redis://127.0.0.1:1/0?unheard_of=1"),
    ],
)
def test_a_url_that_names_no_store_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        open_store(url)
    assert "secret" not in raised.value.message


def test_an_unknown_scheme_is_refused_with_the_accepted_ones() -> None:
    with pytest.raises(InvalidRequest, match=r"sqlite:///.*redis://.*rediss://.*unix://.*, got 'etcd'"):
        open_store("etcd://host")


def test_a_quoted_path_is_opened(tmp_path: Path) -> None:
    open_store(f"sqlite://{tmp_path}/a%20%3Fb.db").close()
    assert (tmp_path / "a ?b.db").exists()


# --- SQLite --------------------------------------------------------------------------------------


def test_sqlite_is_private_and_durable(tmp_path: Path) -> None:
    path = tmp_path / "new" / "state.db"
    store = SqliteStore(path)
    store.commit([put("a", "1")])
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in [path.parent, *path.parent.iterdir()]}
    assert modes == {"new": 0o700, "state.db": 0o600, "state.db-wal": 0o600, "state.db-shm": 0o600}
    with store._connection() as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert db.execute("PRAGMA synchronous").fetchone() == (2,)
    store.close()
    assert [p.name for p in path.parent.iterdir()] == ["state.db"]


def test_a_second_store_in_the_process_leaves_the_first_ones_locks(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    first = SqliteStore(path)
    first.commit([put("a", "1")])
    SqliteStore(path).close()
    # If the locks of `first` were gone, this process would take itself for the last and remove the log.
    script = "import sys; from controlplane.state.stores import open_store; open_store(sys.argv[1]).close()"
    assert child(script, f"sqlite://{path}").wait(90) == 0
    assert path.with_name("state.db-wal").exists()
    first.commit([put("b", "1")])
    second = SqliteStore(path)
    assert set(second.snapshot(["model"]).entries["model"]) == {"a", "b"}
    first.close()
    second.close()


@pytest.mark.parametrize("content", [b"x", b"not a database" * 1000], ids=["short", "long"])
def test_a_file_that_is_no_database(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state.db"
    path.write_bytes(content)
    with pytest.raises(Unavailable, match=r"damaged or no SQLite database.*restore a backup"):
        SqliteStore(path)
    assert path.read_bytes() == content


def test_a_damaged_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = SqliteStore(path)
    store.commit([put(str(i), "x" * 1000) for i in range(100)])
    store.close()
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(path.stat().st_size - 4096))
    with pytest.raises(Unavailable, match="damaged"):
        SqliteStore(path).snapshot(["model"])


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    SqliteStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE schema_version SET version = 2")
    db.close()
    with pytest.raises(Unavailable, match=r"newer Ostinato.*schema 2.*upgrade"):
        SqliteStore(path)


@pytest.mark.parametrize("path", ["file/state.db", "file/deeper/state.db", "folder"])
def test_a_path_that_cannot_be_a_file(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(Unavailable, match=str(tmp_path)):
        SqliteStore(tmp_path / path)


def test_a_lock_held_too_long(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = SqliteStore(path, busy_timeout_s=0.1)
    store.commit([put("a", "1")])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable, match="stayed locked") as raised:
        store.commit([put("a", "2")])
    assert raised.value.retry_after_s == 1.0
    assert store.get("model", "a") == Entry("1", 1)  # readers go on
    other.close()
    assert store.commit([put("a", "2")]) == 2
    store.close()


def test_connections_are_reused_and_released(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = SqliteStore(path)
    for _ in range(10):  # ten generations of threads, as a server's pool makes them
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: store.snapshot(KINDS), range(8)))
    assert 1 <= len(store._idle) <= 4
    store.close()
    store.close()
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if fd.exists() and fd.samefile(path)]
    with pytest.raises(Unavailable, match="closed"):
        store.revision()


# --- Redis ---------------------------------------------------------------------------------------


def test_redis_keys_share_one_hash_tag(redis_url: str) -> None:
    prefix = f"tag-{uuid.uuid4().hex}"
    store = open_store(f"{redis_url}?prefix={prefix}")
    store.commit([put("a", "1"), put("b", "1", None, "deployment")])
    store.take_lease("c", "me", 9)
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        keys = set(client.scan_iter(f"*{prefix}*"))
    ends = ("revision", "log", "changes", "entries:model", "entries:deployment", "lease:c")
    assert keys == {f"{{{prefix}}}:{end}" for end in ends}
    store.close()


def test_prefixes_are_separate(redis_url: str) -> None:
    first, second = (open_store(f"{redis_url}?prefix={uuid.uuid4().hex}") for _ in range(2))
    first.commit([put("a", "1")])
    assert second.revision() == 0
    assert contents(second) == {"model": {}, "deployment": {}}
    first.close()
    second.close()


def test_a_redis_that_forgets_its_scripts(redis_url: str, store: StateStore) -> None:
    store.commit([put("a", "1")])
    with redis.Redis.from_url(redis_url) as client:
        client.script_flush()
    assert store.commit([put("a", "2", 1)]) == 2 == store.snapshot(KINDS).revision


def test_a_foreign_key_in_the_way_writes_nothing(redis_url: str) -> None:
    prefix = uuid.uuid4().hex
    with redis.Redis.from_url(redis_url) as client:
        client.set(f"{{{prefix}}}:entries:model", "not a hash")
    store = open_store(f"{redis_url}?prefix={prefix}")
    with pytest.raises(Unavailable, match="WRONGTYPE"):
        store.commit([put("a", "1", None, "deployment"), put("a", "1")])
    assert store.revision() == 0
    assert store.get("deployment", "a") is None
    store.close()


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        (("--appendonly", "no"), "the whole state is lost"),
        (("--appendonly", "no", "--save", "60 1"), "after the last snapshot"),
        (("--appendfsync", "everysec"), "power cut"),
        (("--maxmemory-policy", "allkeys-lru"), "noeviction"),
        ((), None),
        (("--rename-command", "CONFIG", ""), None),
    ],
)
def test_a_redis_that_would_lose_state_is_reported(
    start_redis: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    options: tuple[str, ...],
    warning: str | None,
) -> None:
    server = start_redis(*options)
    with caplog.at_level(logging.WARNING, "controlplane.state.redis"):
        store = open_store(server.url)
    assert ([warning in m for m in caplog.messages] == [True]) if warning else not caplog.messages
    assert store.commit([put("a", "1", 0)]) == 1
    store.close()


def test_a_refused_login_and_a_full_memory(start_redis: Callable[..., Any]) -> None:
    server = start_redis()
    store = open_store(server.url)
    store.commit([put("a", "1")])
    with redis.Redis(port=server.port) as client:
        client.config_set("maxmemory", "1")
        with pytest.raises(Unavailable, match="memory"):
            store.commit([put("a", "2"), put("b", "2")])
        assert contents(store)["model"] == {"a": Entry("1", 1)}
        client.config_set("maxmemory", "0")
        client.config_set("requirepass", "right")
    with pytest.raises(Unavailable, match="login") as raised:
        open_store(f"redis://:wrongsecret@127.0.0.1:{server.port}/0")
    assert "wrongsecret" not in raised.value.message
    store.close()


def test_the_store_works_over_a_unix_socket(start_redis: Callable[..., Any], tmp_path: Path) -> None:
    start_redis("--unixsocket", str(tmp_path / "r.sock"))
    store = open_store(f"unix://{tmp_path}/r.sock?db=3&prefix=u")
    assert store.commit([put("a", "1", 0)]) == 1
    store.close()
    with redis.Redis(unix_socket_path=str(tmp_path / "r.sock"), db=3) as client:
        assert client.exists("{u}:revision")


def test_the_store_works_on_a_redis_cluster(
    start_redis: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_module, "WAIT_MS", 1)
    servers = [start_redis("--cluster-enabled", "yes", "--cluster-node-timeout", "2000") for _ in range(2)]
    clients: list[Any] = [redis.Redis(port=server.port, decode_responses=True) for server in servers]
    for client, slots in zip(clients, ((0, 8191), (8192, 16383)), strict=True):
        client.execute_command("CLUSTER ADDSLOTSRANGE", *slots)
    clients[0].execute_command("CLUSTER MEET", "127.0.0.1", servers[1].port)
    deadline = time.monotonic() + 60
    while any(client.cluster("info")["cluster_state"] != "ok" for client in clients):
        assert time.monotonic() < deadline, "the cluster did not form"
        time.sleep(0.05)
    for prefix in ("a", "b", "c", "d"):
        store = open_store(f"{servers[0].url}?prefix={prefix}")
        assert store.commit([put("a", "1", 0), put("b", "1", 0, "deployment")]) == 1
        with pytest.raises(StaleWrite):
            store.commit([put("a", "1", 0)])
        assert contents(store) == {"model": {"a": Entry("1", 1)}, "deployment": {"b": Entry("1", 1)}}
        assert store.changes(KINDS, 0) == Changes(1, contents(store))
        store.close()
        waiting = open_store(f"{servers[0].url}?prefix={prefix}&replicas=1")
        with pytest.raises(Unavailable, match=r"^only 0 of 1 Redis replicas .* it was applied"):
            waiting.commit([put("a", "2", 1)])
        assert waiting.get("model", "a") == Entry("2", 2)
        waiting.close()
    assert all(client.dbsize() for client in clients)
    for client in clients:
        client.close()
