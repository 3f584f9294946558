"""A replica's own server, started by Serve's function as Serve starts it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from doors import HEAD, part

from controlplane.runtime.replica_http import answer_first
from tests.conftest import free_port
from workers.server.gathered_writes import GatheringProtocol


def saying(text: bytes) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({**HEAD, "headers": []})
        await send(part(text, more=False))

    return app


SEPARATE = "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"


def test_where_serve_has_a_thread_for_ours_its_server_stays_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve._private import constants, replica

    before = replica.start_asgi_http_server
    monkeypatch.setattr(replica, "start_asgi_http_server", before)
    monkeypatch.setattr(constants, SEPARATE, True)
    answer_first(saying(b"ours"))
    assert replica.start_asgi_http_server is before


async def test_inference_goes_before_what_is_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve._private import constants, replica
    from ray.serve._private.http_util import (
        configure_http_middlewares,
        configure_http_options_with_defaults,
    )
    from ray.serve.config import HTTPOptions

    monkeypatch.setattr(replica, "start_asgi_http_server", replica.start_asgi_http_server)
    monkeypatch.setattr(constants, SEPARATE, False)
    answer_first(saying(b"ours"))
    options = configure_http_options_with_defaults(HTTPOptions(host="127.0.0.1", port=free_port()))
    task, server = await replica.start_asgi_http_server(
        saying(b"Serve's"),
        configure_http_middlewares(options),
        event_loop=asyncio.get_running_loop(),
        enable_so_reuseport=False,
    )
    try:
        async with asyncio.timeout(60):
            while not server.started:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert server.config.http_protocol_class is GatheringProtocol
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{options.port}", trust_env=False
            ) as http:
                for method, path, text in (
                    ("POST", "/v1/chat/completions", "ours"),
                    ("POST", "/v1/completions", "ours"),
                    ("GET", "/v1/completions", "Serve's"),
                    ("GET", "/-/healthz", "Serve's"),
                ):
                    reply = await http.request(method, path)
                    assert reply.text == text
                    assert len(reply.headers.get_list("x-request-id")) == 1
    finally:
        server.should_exit = True
        await task
