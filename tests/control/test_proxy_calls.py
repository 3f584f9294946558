"""A gateway's calls to the proxy that passed a request on: a real Ray, and actors in the place of proxies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks.hardening.probing import waiting_for
from controlplane import errors
from controlplane.runtime import proxy_calls
from controlplane.runtime.proxy_calls import ProxyCalls, follow_proxies

ray = pytest.importorskip("ray")
NAME = "SERVE_PROXY_ACTOR-of-a-node"
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", namespace="serve")
    yield
    ray.shutdown()


def proxy(says: bytes) -> Any:
    class Proxy:
        def receive_asgi_messages(self, request: str) -> bytes:
            if request == "gone":
                raise KeyError(request)
            return says

    return ray.remote(num_cpus=0)(Proxy).options(name=NAME, namespace="serve").remote()


def ended(actor: Any) -> None:
    """Killed, and known to be: Ray kills some time later."""
    ray.kill(actor)
    assert (
        waiting_for(lambda: raises(ray.exceptions.ActorDiedError, lambda: ray.get(asked(actor))), TIMEOUT_S)
        is not None
    )
    assert (
        waiting_for(lambda: raises(ValueError, lambda: ray.get_actor(NAME, namespace="serve")), TIMEOUT_S)
        is not None
    )


def asked(actor: Any) -> Any:
    return actor.receive_asgi_messages.remote("a")


def raises(kind: type[Exception], call: Callable[[], object]) -> bool:
    try:
        call()
    except kind:
        return True
    except ray.exceptions.RayActorError:  # it is away, and not known to be dead yet
        return False
    return False


def test_one_that_was_replaced_is_asked_in_its_place(cluster: None) -> None:
    first = proxy(b"first")
    calls = ProxyCalls(NAME)
    assert asyncio.run(calls("a")) == b"first"
    ended(first)
    second = proxy(b"second")
    assert asyncio.run(calls("a")) == b"second"
    assert asyncio.run(calls("a")) == b"second"
    ended(second)


def test_a_process_that_was_not_told_forgets_the_dead_one_first(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Ray's, its name leads to the dead one until that is forgotten."""
    first = proxy(b"first")
    calls = ProxyCalls(NAME)
    ended(first)
    second = proxy(b"second")
    forget = proxy_calls._forget
    forgotten: list[Any] = []

    def by_name(name: str) -> Any:
        return second if forgotten else first

    def forgetting(actor: Any) -> None:
        forget(actor)
        forgotten.append(actor)

    monkeypatch.setattr(proxy_calls, "_by_name", by_name)
    monkeypatch.setattr(proxy_calls, "_forget", forgetting)
    assert asyncio.run(calls("a")) == b"second"
    assert forgotten == [first]
    ended(second)


def test_one_that_only_cannot_be_reached_is_not_forgotten(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = proxy(b"one")
    calls = ProxyCalls(NAME)

    async def away(request: Any) -> bytes:
        raise ray.exceptions.ActorUnavailableError("the network is away", one._actor_id.binary())

    monkeypatch.setattr(calls, "_ask", away)
    with pytest.raises(errors.Unavailable, match="try again"):
        asyncio.run(calls("a"))
    assert ray.get(asked(one)) == b"one"
    ended(one)


def test_one_that_is_gone_for_good_is_unavailable(cluster: None) -> None:
    only = proxy(b"only")
    calls = ProxyCalls(NAME)
    ended(only)
    with pytest.raises(errors.Unavailable, match="away"):
        asyncio.run(calls("a"))
    with pytest.raises(ValueError, match=NAME):
        ProxyCalls(NAME)


def test_what_it_says_of_a_request_is_passed_on(cluster: None) -> None:
    """Serve takes a KeyError for a client that left."""
    one = proxy(b"one")
    with pytest.raises(KeyError):
        asyncio.run(ProxyCalls(NAME)("gone"))
    ended(one)


def test_serves_requests_make_such_calls(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve._private.common import StreamingHTTPRequest

    before = StreamingHTTPRequest.__dict__["receive_asgi_messages"]
    monkeypatch.setattr(StreamingHTTPRequest, "receive_asgi_messages", before)
    one = proxy(b"one")
    follow_proxies()
    request = StreamingHTTPRequest({}, proxy_actor_name=NAME)
    assert isinstance(request.receive_asgi_messages, ProxyCalls)
    assert request.receive_asgi_messages is request.receive_asgi_messages
    assert asyncio.run(request.receive_asgi_messages("a")) == b"one"
    given = StreamingHTTPRequest({}, receive_asgi_messages=one.receive_asgi_messages.remote)
    assert not isinstance(given.receive_asgi_messages, ProxyCalls)
    ended(one)
