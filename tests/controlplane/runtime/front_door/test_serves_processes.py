"""The changes of Serve's own processes of the front door, and the environment in which gateways start."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from controlplane.runtime.front_door import environment, fallback
from controlplane.runtime.patches.uvicorn.closed_proxy import Closed


def test_serves_controller_starts_an_actor_that_keeps_asking() -> None:
    """In a process of its own: what is changed is Serve's."""
    script = """
        from controlplane.runtime.front_door import manager
        from controlplane.runtime.patches.ray import haproxy_manager
        from ray.serve._private import controller, long_poll

        manager.prepare()
        actor = controller.HAProxyManager
        assert actor.__ray_metadata__.class_name == "HAProxyManager"
        before = long_poll.LongPollClient._poll_next
        haproxy_manager.HAProxyManager._haproxy = None
        try:
            haproxy_manager.HAProxyManager()
        except TypeError:  # it was given nothing
            pass
        assert long_poll.LongPollClient._poll_next is not before
        print("kept")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "kept\n", done.stderr


def test_the_controller_calls_our_patch_before_it_makes_proxies() -> None:
    """This fails with a Ray of another order."""
    from ray.serve._private.controller import ServeController

    source = inspect.getsource(ServeController)
    called, made = (source.index(text) for text in ("CONTROLLER_CALLBACK_IMPORT_PATH)", "HAProxyManager if"))
    assert called < made


async def test_serves_own_proxy_ends_each_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    from uvicorn.protocols.http import auto

    monkeypatch.setattr(auto, "AutoHTTPProtocol", auto.AutoHTTPProtocol)  # put back afterwards
    assert fallback.prepare() == []
    assert auto.AutoHTTPProtocol is Closed
    server = await asyncio.get_running_loop().create_server(Closed, "127.0.0.1", 0)
    async with server:
        reader, _ = await asyncio.open_connection(*server.sockets[0].getsockname())
        with pytest.raises(ConnectionResetError):
            await reader.read(1)


def test_a_gateways_server_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray import serve
    from uvicorn.protocols.http import auto

    before = auto.AutoHTTPProtocol
    monkeypatch.setattr(serve, "get_replica_context", lambda: None)
    assert fallback.prepare() == []
    assert auto.AutoHTTPProtocol is before


def test_a_gateway_does_not_start_without_the_front_door() -> None:
    """Otherwise Serve's Python proxy, or HAProxy without our limits, would pass requests on to it."""
    ours = environment.of_one_machine(Path("/tmp/ostinato-1"), "1f")
    assert environment.problem(ours) == ""
    for name, other in (
        ("RAY_SERVE_ENABLE_HA_PROXY", "0"),
        (environment.BINARY, ""),
        (environment.BINARY, "/usr/sbin/haproxy"),
        (environment.CALLBACK, ""),
    ):
        assert f"{name}={other!r}" in environment.problem({**ours, name: other})
    assert "deploy/ray.env" in environment.problem({})


def test_homes_have_windows_of_ports_of_their_own() -> None:
    """All below those that Linux gives to clients, and above those of Ray's processes."""
    windows = set()
    for number in range(environment.WINDOWS):
        told = environment.of_one_machine(Path("/x"), f"{number:x}")
        names = ("FALLBACK_PROXY_HTTP_PORT", "DIRECT_INGRESS_MIN_HTTP_PORT", "DIRECT_INGRESS_MAX_HTTP_PORT")
        proxy, first, last = (int(told[f"RAY_SERVE_{name}"]) for name in names)
        assert 19_999 < proxy < first < last < 32_768
        windows.add(range(proxy, last))
    assert len(set().union(*windows)) == sum(map(len, windows))
