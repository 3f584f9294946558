"""What Serve keeps of an answer that its proxy does not take: the installed Ray's queue, bounded."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.serve._private import replica

from controlplane.runtime import unsent
from controlplane.runtime.unsent import MESSAGE_BYTES, Unsent, bound_answers

LIMIT = 10_000
BODY = 1000 * b"x"


@pytest.fixture
def _put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "MessageQueue", replica.MessageQueue)
    wrapper = replica.UserCallableWrapper
    monkeypatch.setattr(wrapper, "_call_http_entrypoint", wrapper._call_http_entrypoint)


class Wrapper(replica.UserCallableWrapper):  # type: ignore[misc]  # Ray has no types
    """Serve's, as far as a request needs it, around an application. `thread`: where it runs then."""

    def __init__(self, app: Any, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._callable = app
        self._run_user_code_in_separate_thread = loop is not None
        self._user_code_event_loop = loop or asyncio.get_running_loop()
        self._local_testing_mode = False
        self._is_enabled_for_debug = False
        self._info = SimpleNamespace(is_asgi_app=True, callable=app, takes_any_args=True, name="app")

    def get_user_method_info(self, name: str) -> Any:
        return self._info

    def _raise_if_not_initialized(self, name: str) -> None:
        pass

    async def _call_func_or_gen(self, callable: Any, *, args: Any, **more: Any) -> Any:
        return await callable(*args), False

    async def _handle_user_method_result(self, result: Any, *given: Any, **more: Any) -> Any:
        return result

    def answers(self) -> Any:
        async def receive() -> Any:
            await asyncio.Event().wait()

        metadata = SimpleNamespace(call_method="__call__")
        return self.call_http_entrypoint(metadata, lambda status: None, {"type": "http"}, receive)


class Sending:
    def __init__(self, count: int) -> None:
        self.count = count
        self.sent = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        for number in range(self.count):
            await send({"type": "http.response.body", "body": BODY, "number": number})
            self.sent += 1


async def settled(app: Sending) -> int:
    """How many it had sent when nothing more went out."""
    before = -1
    while before != app.sent:
        before = app.sent
        await asyncio.sleep(0.05)
    return before


@pytest.fixture(params=["one loop", "two threads"])
def user_loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop | None]:
    if request.param == "one loop":
        yield None
        return
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.usefixtures("_put_back")
async def test_an_application_waits_for_the_proxy(user_loop: asyncio.AbstractEventLoop | None) -> None:
    bound_answers(LIMIT)
    app = Sending(200)
    async with asyncio.timeout(60):
        batches = Wrapper(app, user_loop).answers()
        got = list(await anext(batches))
        await asyncio.sleep(0)
        most = LIMIT // (MESSAGE_BYTES + len(BODY)) + 2
        assert len(got) <= most
        assert await settled(app) <= len(got) + most
        async for batch in batches:
            assert len(batch) <= most
            got += batch
    assert [message["number"] for message in got] == list(range(200))


@pytest.mark.usefixtures("_put_back")
async def test_of_another_ray_nothing_is_touched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = replica.MessageQueue, replica.UserCallableWrapper._call_http_entrypoint
    monkeypatch.setattr(ray, "__version__", "3.0.0")
    with caplog.at_level(logging.WARNING, unsent.log.name):
        bound_answers(LIMIT)
    assert (replica.MessageQueue, replica.UserCallableWrapper._call_http_entrypoint) == before
    assert "expected Ray 2.60" in caplog.text


def test_the_installed_ray_is_the_one_that_was_tested() -> None:
    assert ray.__version__.startswith(unsent.TESTED)


async def test_room_is_there_again_when_some_was_taken() -> None:
    kept = Unsent(LIMIT)
    messages = [{"body": BODY}] * 20
    for message in messages:
        kept.add(message)
    waiting = asyncio.create_task(kept.room())
    await asyncio.sleep(0)
    kept.take(messages[:5])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    kept.take(messages[5:15])
    await asyncio.wait_for(waiting, 30)
