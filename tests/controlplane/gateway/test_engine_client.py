"""Requests from a gateway to workers behind real doors: which one gets them, and what comes of failures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from controlplane import errors
from controlplane.gateway import base_workers, worker_directory
from controlplane.gateway.engine_client import EngineClient
from testkit.doors import HEAD, Held, opened, part, report
from testkit.engine_configs import echo_config
from testkit.loops import until
from workers.messages import EngineCall, EngineHead, VariantRef, WorkerReport
from workers.server.worker import Worker

CONFIG = echo_config()
ASK = EngineCall("/v1/completions", b'{"model": "b", "prompt": "a b"}')
V = VariantRef("v", 7, "/a")


class Cluster:
    """The answers of `find`: the reports of the moment, or an error."""

    def __init__(self, *reports: WorkerReport) -> None:
        self.reports = list(reports)
        self.asked = 0
        self.error: Exception | None = None

    async def find(self, base: str) -> list[WorkerReport]:
        self.asked += 1
        await asyncio.sleep(0.01)
        if self.error is not None:
            raise self.error
        return list(self.reports)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_directory, "RETRY_S", 0.01)
    monkeypatch.setattr(base_workers, "REFRESH_S", 0.02)


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker(CONFIG, "127.0.0.1")
    await worker.start()
    await worker.open_door("127.0.0.1")
    yield worker
    await worker.close()


@contextlib.asynccontextmanager
async def client_of(cluster: Cluster, max_queued: int = 100) -> AsyncIterator[EngineClient]:
    client = EngineClient(cluster.find, max_queued)
    yield client
    client.close()


async def answering(scope: Any, receive: Any, send: Any) -> None:
    await send(HEAD)
    await send(part(b"here", more=False))


# --- answers -------------------------------------------------------------------------------------


async def test_a_whole_answer_is_read(worker: Worker) -> None:
    async with client_of(Cluster(await worker.report())) as client:
        reply = await client.call("b", ASK)
        assert (reply.status, reply.content_type) == (200, "application/json")
        assert json.loads(reply.body)["choices"][0]["text"] == "a b"


async def test_a_stream_in_the_engines_own_pieces(worker: Worker) -> None:
    async with client_of(Cluster(await worker.report())) as client:
        request = EngineCall("/v1/completions", b'{"model": "b", "prompt": "a b", "stream": true}')
        items = [item async for item in client.stream("b", request)]
        assert items[0] == EngineHead(200, "text/event-stream")
        assert len(items) == 5
        assert items[-1] == b"data: [DONE]\n\n"
        assert items == [item async for item in worker.stream(request)]


async def test_a_request_brings_its_variant(worker: Worker) -> None:
    async with client_of(Cluster(await worker.report())) as client:
        await client.call("b", EngineCall(ASK.path, ASK.body, V))
        assert worker.engine.variants() == ("v",)


async def test_a_worker_with_a_failed_engine_gets_no_request(worker: Worker) -> None:
    """Until it is replaced it would answer at once, and so draw more requests than others with its errors."""
    worker.engine.failed = True  # type: ignore[misc]
    async with opened(answering) as door:
        async with client_of(Cluster(await worker.report(), report(door))) as client:
            replies = [await client.call("b", EngineCall(ASK.path, ASK.body, v)) for v in (None, V) * 5]
        assert [reply.body for reply in replies] == [b"here"] * 10


async def test_an_engine_that_raises_has_failed() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError

    async with opened(app) as door, client_of(Cluster(report(door))) as client:
        assert (await client.call("b", ASK)).status == 500


async def test_a_stream_that_breaks_keeps_what_came() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(HEAD)
        await send(part(b"so far"))
        raise ZeroDivisionError

    async with opened(app) as door, client_of(Cluster(report(door))) as client:
        items = client.stream("b", ASK)
        assert [await anext(items), await anext(items)] == [EngineHead(200, "text/event-stream"), b"so far"]
        with pytest.raises(errors.EngineFailed, match="died during this request"):
            await anext(items)


# --- which worker --------------------------------------------------------------------------------


async def test_requests_go_where_there_is_least_to_do() -> None:
    apps = [Held(), Held(), Held()]
    async with contextlib.AsyncExitStack() as stack:
        doors = [await stack.enter_async_context(opened(app)) for app in apps]
        client = await stack.enter_async_context(client_of(Cluster(*map(report, doors))))
        running = [asyncio.create_task(client.call("b", ASK)) for _ in range(6)]
        await until(lambda: sum(app.asked for app in apps) == 6)
        assert [app.asked for app in apps] == [2, 2, 2]
        apps[1].may_answer.set()
        await until(lambda: sum(task.done() for task in running) == 2)
        await client.call("b", ASK)
        assert apps[1].asked == 3
        for app in apps:
            app.may_answer.set()
        assert {reply.body for reply in await asyncio.gather(*running)} == {b"late"}


async def test_simultaneous_requests_share_one_look_up(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_workers, "REFRESH_S", 60.0)
    cluster = Cluster(await worker.report())
    async with client_of(cluster) as client:
        await asyncio.gather(*(client.call("b", ASK) for _ in range(20)))
        assert cluster.asked == 1


async def test_workers_that_come_and_go_are_noticed() -> None:
    old, new = Held(), Held()
    async with opened(old) as first, opened(new) as second:
        cluster = Cluster(report(first))
        async with client_of(cluster) as client:
            running = asyncio.create_task(client.call("b", ASK))
            await old.arrived.wait()
            cluster.reports = [report(second)]
            seen = cluster.asked
            await until(lambda: cluster.asked >= seen + 2)
            later = asyncio.create_task(client.call("b", ASK))
            await new.arrived.wait()
            old.may_answer.set()
            new.may_answer.set()
            assert [(await task).body for task in (running, later)] == [b"late", b"late"]


async def test_a_base_without_requests_is_not_looked_up(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_workers, "IDLE_S", 0.05)
    cluster = Cluster(await worker.report())
    async with client_of(cluster) as client:
        await client.call("b", ASK)
        watching = client._bases["b"]._refreshing
        assert watching is not None
        await watching
        seen = cluster.asked
        await client.call("b", ASK)
        await until(lambda: cluster.asked > seen)


async def test_known_workers_stay_when_a_look_up_fails(worker: Worker) -> None:
    cluster = Cluster(await worker.report())
    async with client_of(cluster) as client:
        await client.call("b", ASK)
        cluster.error, seen = RuntimeError("Serve is away"), cluster.asked
        await until(lambda: cluster.asked > seen + 1)
        assert (await client.call("b", ASK)).status == 200


# --- back-pressure -------------------------------------------------------------------------------


async def test_too_many_are_refused_until_there_is_room() -> None:
    app = Held()
    async with opened(app) as door, client_of(Cluster(report(door, limit=2)), max_queued=1) as client:
        running = [asyncio.create_task(client.call("b", ASK)) for _ in range(1)]
        await app.arrived.wait()
        running += [asyncio.create_task(client.call("b", ASK)) for _ in range(2)]
        await until(lambda: app.asked == 2)
        for attempt in (client.call("b", ASK), anext(client.stream("b", ASK))):
            with pytest.raises(errors.Overloaded) as caught:
                await attempt
            assert caught.value.retry_after_s == 1
            assert caught.value.details == {"reason": "full_line"}
        app.may_answer.set()
        await asyncio.gather(*running)
        assert (await client.call("b", ASK)).body == b"late"
    assert app.asked == 4


# --- what fails ----------------------------------------------------------------------------------


async def test_a_worker_that_is_gone_is_passed_over() -> None:
    async with opened(answering) as gone:
        dead = report(gone)
    async with opened(answering) as door, client_of(Cluster(dead, report(door))) as client:
        assert [(await client.call("b", ASK)).body for _ in range(8)] == [b"here"] * 8


async def test_a_worker_server_that_refuses_is_skipped() -> None:
    async with opened(answering) as closing, opened(answering) as door:
        stopping = report(closing)
        closing.closing = True
        async with client_of(Cluster(stopping, report(door))) as client:
            assert [(await client.call("b", ASK)).body for _ in range(8)] == [b"here"] * 8


async def test_a_port_that_another_process_has_now_is_skipped() -> None:
    """Its secret is another: the request was not for it."""
    async with opened(answering) as other, opened(answering) as door:
        old = WorkerReport(1, "node", (), "test", address=other.address, secret="old", max_ongoing_requests=4)
        async with client_of(Cluster(old, report(door))) as client:
            assert [(await client.call("b", ASK)).body for _ in range(8)] == [b"here"] * 8


@pytest.mark.parametrize("proves", [True, False])
async def test_a_foreign_server_that_answers_everything_is_skipped(proves: bool) -> None:
    """A program that is no worker has the port now. Workers of older versions are believed all the same."""

    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                if b"POST " in head:  # and not a question for its load
                    asked.append(head)
                writer.write(b"HTTP/1.1 405 Method Not Allowed\r\ncontent-length: 7\r\n\r\nstrange")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as stranger, opened(answering) as door:
        host, port = stranger.sockets[0].getsockname()
        proof = "what the worker had" if proves else ""
        old = replace(report(door), address=f"{host}:{port}", proof=proof)
        async with client_of(Cluster(old, report(door))) as client:
            bodies = set()
            while not asked or b"here" not in bodies:  # who is idle is chosen at random
                bodies.add((await client.call("b", ASK)).body)
        assert bodies == ({b"here"} if proves else {b"here", b"strange"})


async def test_requests_wait_for_an_engine_that_restarts() -> None:
    cluster = Cluster()
    cluster.error = RuntimeError("no replica")
    async with opened(answering) as door, client_of(cluster) as client:
        waiting = [asyncio.create_task(client.call("b", ASK)) for _ in range(4)]
        await until(lambda: cluster.asked > 2)
        cluster.error, cluster.reports = None, [report(door)]
        assert [(await task).body for task in waiting] == [b"here"] * 4


async def test_a_request_is_not_resent_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_workers, "WAIT_S", 0.1)
    async with opened(answering) as gone:
        dead = report(gone)
    for cluster in (Cluster(), Cluster(dead)):
        async with client_of(cluster) as client:
            with pytest.raises(errors.Unavailable) as caught:
                await client.call("b", ASK)
            assert caught.value.retry_after_s
        assert cluster.asked < 60, "a worker that cannot be reached is asked in a circle"


SERVER = """
import asyncio, sys
from testkit import doors

async def main():
    app = doors.Held(streams=sys.argv[1] == "True")
    async with doors.opened(app) as door:
        print(door.address, door.secret, flush=True)
        await app.arrived.wait()
        print("arrived", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
async def test_a_worker_killed_during_a_request(streams: bool, pytestconfig: pytest.Config) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, str(streams), stdout=subprocess.PIPE, cwd=pytestconfig.rootpath
    )
    assert process.stdout is not None
    try:
        address, secret = (await process.stdout.readline()).decode().split()
        dying = WorkerReport(1, "n", (), "t", address=address, secret=secret, max_ongoing_requests=4)
        cluster, spare = Cluster(dying), Held()
        async with opened(spare) as door, client_of(cluster) as client:
            items = client.stream("b", ASK)
            next_item = asyncio.create_task(anext(items))
            assert await process.stdout.readline() == b"arrived\n"
            cluster.reports = [report(door)]
            if streams:
                await next_item
                assert await anext(items) == b"data: 1\n\n"
                next_item = asyncio.create_task(anext(items))
            process.kill()
            with pytest.raises(errors.EngineFailed) as caught:
                await next_item
            assert caught.value.retry_after_s
            assert spare.asked == 0, "it was sent to another worker after one had it"
            await process.wait()  # a process that dies may close its port after its connections
            spare.may_answer.set()
            assert (await client.call("b", ASK)).body == b"late"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


# --- clients that leave --------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
async def test_a_client_that_leaves_is_seen_by_the_worker(streams: bool) -> None:
    app = Held(streams)
    async with opened(app) as door, client_of(Cluster(report(door))) as client:
        if streams:
            items = client.stream("b", ASK)
            assert [await anext(items), await anext(items)][1] == b"data: 1\n\n"
            await items.aclose()
        else:
            running = asyncio.create_task(client.call("b", ASK))
            await app.arrived.wait()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await app.left.wait()
        app.may_answer.set()
        assert client._workers("b").demand.in_flight == 0
        assert (await client.call("b", ASK)).status == 200


async def test_requests_for_a_sleeping_base_are_counted_and_wait_until_it_wakes(worker: Worker) -> None:
    cluster = Cluster()
    async with client_of(cluster, max_queued=2) as client:
        asked = [asyncio.create_task(client.call("b", ASK)) for _ in range(2)]
        await until(lambda: cluster.asked > 1)
        assert 0 < client.demand()["b"] <= 2  # what wakes it
        assert client.demand() == {"b": pytest.approx(2)}
        with pytest.raises(errors.Overloaded) as refusal:
            await client.call("b", ASK)
        assert refusal.value.retry_after_s
        assert not any(task.done() for task in asked)
        cluster.reports = [await worker.report()]
        assert [(await task).status for task in asked] == [200, 200]
        demand = client.demand()["b"]
        assert 0 < demand <= 3, "they ended since it was last asked, and the refused one was wanted, too"
        await until(lambda: client.demand() == {})


async def test_a_probe_is_no_demand_and_takes_room() -> None:
    """Probes of the request path must not add engines, nor keep an idle one."""
    app = Held()
    async with opened(app) as door, client_of(Cluster(report(door, limit=1)), max_queued=1) as client:
        running = []
        for _ in range(2):  # the first one is at the worker, the second one waits
            running.append(asyncio.create_task(client.call("b", ASK._replace(counted=False))))
            await until(lambda: app.asked == 1)
        await until(lambda: len(client._bases["b"].queue) == 1)
        assert client.demand() == {}
        with pytest.raises(errors.Overloaded):
            await client.call("b", ASK._replace(counted=False))
        app.may_answer.set()
        assert [(await task).status for task in running] == [200, 200]
        assert client.demand() == {}


async def test_requests_in_a_group_that_is_given_up_end_and_others_go_on() -> None:
    """The node may vanish without notice: the connection stands, and no process answers."""
    lost, fine, alive = Held(), Held(streams=True), {"b", "b@1", "b@2"}
    async with opened(lost) as gone, opened(fine) as there:
        cluster = Cluster(replace(report(gone), group="b"))
        client = EngineClient(cluster.find, 100, alive.__contains__)
        first = asyncio.create_task(client.call("b", ASK))
        await lost.arrived.wait()
        cluster.reports = [replace(report(there), group="b@1")]  # "b" is drained, or lost
        asked = cluster.asked
        await until(lambda: cluster.asked > asked + 1)  # the client has seen it
        second = asyncio.create_task(client.call("b", ASK))
        await fine.arrived.wait()
        assert not first.done()  # as long as it is alive it may answer
        alive.remove("b")
        with pytest.raises(errors.EngineFailed) as failure:
            await first
        assert failure.value.retry_after_s
        assert not second.done()
        fine.may_answer.set()
        assert (await second).status == 200
        client.close()
