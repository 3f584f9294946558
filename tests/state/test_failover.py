"""A Redis whose replica becomes the primary: real servers, and a proxy that leads to the one or the other."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from controlplane.errors import Unavailable
from controlplane.state import Entry, Write
from controlplane.state.records import Model, Phase
from controlplane.state.redis import EPOCH, RedisStore
from controlplane.state.repository import Put, Repository
from controlplane.state.stores import open_store
from testkit.redis_pair import RedisPair

pytestmark = pytest.mark.slow  # real servers


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[RedisPair]:
    servers = RedisPair(tmp_path / "redis")
    yield servers
    servers.stop()


def put(key: str, value: str) -> Write:
    return Write("model", key, value, None)


def test_acknowledged_commits_survive_a_failover(pair: RedisPair) -> None:
    acknowledged: list[str] = []
    enough, over = threading.Event(), threading.Event()

    def commit_on_and_on(name: str) -> None:
        store = open_store(f"{pair.address}?replicas=1")
        number = 0
        while not over.is_set():
            number += 1
            with contextlib.suppress(Unavailable):
                store.commit([put(f"{name}-{number}", "x" * 300)])
                acknowledged.append(f"{name}-{number}")
            if len(acknowledged) > 200:
                enough.set()
        store.close()

    threads = [threading.Thread(target=commit_on_and_on, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    assert enough.wait(90)
    pair.fail_over()
    over.set()
    for thread in threads:
        thread.join(60)
    store = open_store(f"redis://127.0.0.1:{pair.replica.port}/0")
    there = store.snapshot(["model"]).entries["model"]
    store.close()
    assert len(acknowledged) > 200
    assert [key for key in acknowledged if key not in there] == []


def test_no_revision_is_used_twice_and_a_loss_is_reported(
    pair: RedisPair, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(pair.address)  # which waits for no replica
    repository = Repository(store)
    revisions = [repository.commit([Put(Model("kept", 1, Phase.READY), None)])]
    with redis.Redis(port=pair.primary.port) as client:
        client.wait(1, 60_000)
    pair.lag()
    revisions += [repository.commit([Put(Model(name, 1, Phase.READY), 0)]) for name in ("lost", "too")]
    assert set(repository.read().models) == {"kept", "lost", "too"}
    pair.fail_over()
    with contextlib.suppress(Unavailable):  # on a connection to the dead
        store.revision()
    with caplog.at_level(logging.ERROR, "controlplane.state.redis"):
        assert set(repository.read().models) == {"kept"}
    assert [r.args for r in caplog.records if r.levelno == logging.ERROR] == [(3, 1)]
    revisions.append(repository.commit([Put(Model("next", 1, Phase.READY), 0)]))
    assert set(repository.read().models) == {"kept", "next"}
    assert revisions == [1, 2, 3, EPOCH]
    assert repository.commit([Put(Model("after", 1, Phase.READY), 0)]) == EPOCH + 1
    assert set(repository.read().models) == {"kept", "next", "after"}
    store.close()


def test_a_commit_that_the_replica_does_not_have_is_not_acknowledged(
    pair: RedisPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"{pair.address}?replicas=1")
    assert store.commit([put("a", "1")]) == 1  # with all the time that it has
    monkeypatch.setattr("controlplane.state.redis.WAIT_MS", 50)
    pair.replica.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(Unavailable, match=r"^only 0 of 1 Redis replicas .* it was applied") as raised:
            store.commit([put("a", "2")])
        assert raised.value.retry_after_s
    finally:
        pair.replica.process.send_signal(signal.SIGCONT)
    assert store.get("model", "a") == Entry("2", 2)
    store.close()


def test_a_redis_whose_failover_would_lose_commits_is_reported(
    pair: RedisPair, caplog: pytest.LogCaptureFixture
) -> None:
    def said(replicas: int) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "controlplane.state.redis"):
            RedisStore(pair.address, replicas=replicas).close()
        return caplog.messages

    assert ["acknowledged before replicas have them" in text for text in said(0)] == [True]
    assert said(1) == []
    assert ["no commit is acknowledged until" in text for text in said(2)] == [True]


def test_the_holder_of_a_lease_that_was_lost_is_not_mistaken(pair: RedisPair) -> None:
    store = open_store(pair.address)
    pair.lag()
    lost = store.take_lease("controller", "a", 60)
    pair.fail_over()
    with contextlib.suppress(Unavailable):
        store.revision()
    other = store.take_lease("controller", "b", 60)
    assert other.holder == "b"
    assert other.epoch != lost.epoch
    assert store.take_lease("controller", "a", 60) == other
    store.close()
