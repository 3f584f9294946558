"""A gateway's calls to the proxy that passed a request on: a real Ray, and actors in the place of proxies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest

from controlplane import errors
from controlplane.runtime.proxy_calls import ProxyCalls, follow_proxies

ray = pytest.importorskip("ray")
NAME = "SERVE_PROXY_ACTOR-of-a-node"


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
    while True:
        try:
            ray.get(actor.receive_asgi_messages.remote("a"))
        except ray.exceptions.ActorDiedError:
            break
        except ray.exceptions.RayActorError:
            continue
    while True:
        try:
            ray.get_actor(NAME, namespace="serve")
        except ValueError:
            return


def test_one_that_was_replaced_is_asked_in_its_place(cluster: None) -> None:
    first = proxy(b"first")
    calls = ProxyCalls(NAME)
    assert asyncio.run(calls("a")) == b"first"
    ended(first)
    second = proxy(b"second")
    assert asyncio.run(calls("a")) == b"second"
    assert asyncio.run(calls("a")) == b"second"
    ended(second)


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
