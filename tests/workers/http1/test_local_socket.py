"""Connections to a server of the same machine, without TCP."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from testkit.doors import HEAD, opened, part
from workers import request_headers
from workers.http1 import local_socket
from workers.http1.client import Connection, Pool
from workers.server.http_server import Door


@pytest.fixture(autouse=True)
async def _soon() -> AsyncIterator[None]:
    async with asyncio.timeout(60):
        yield


async def echo(scope: object, receive: object, send: object) -> None:
    message = await receive()  # type: ignore[operator]
    await send(HEAD)  # type: ignore[operator]
    await send(part(message["body"], more=False))  # type: ignore[operator]


async def answered(door: Door, pool: Pool) -> socket.AddressFamily:
    """The family of the connection on which the door answered."""
    connection = await pool.take()
    headers = request_headers.request_headers(door.secret, None)
    await connection.ask("/", {"host": "x", **headers}, b"one")
    assert await connection.read() == b"one"
    assert request_headers.proves(connection.headers, door.proof)
    return family_of(connection)


def family_of(connection: Connection) -> socket.AddressFamily:
    family: socket.AddressFamily = connection._transport.get_extra_info("socket").family
    return family


async def test_a_server_of_this_machine_is_reached_without_tcp() -> None:
    async with opened(echo) as door:
        assert await answered(door, Pool(door.address, door.local_name)) is socket.AF_UNIX


async def test_a_server_whose_name_is_not_on_this_machine_is_reached_by_tcp() -> None:
    async with opened(echo) as door:
        assert await answered(door, Pool(door.address, f"ostinato-{'0' * 32}")) is socket.AF_INET


async def test_a_name_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user may take the name of a server that ended."""
    another = os.geteuid() + 1
    async with opened(echo) as door:
        monkeypatch.setattr(os, "geteuid", lambda: another)
        with pytest.raises(PermissionError, match="expected a listener of user"):
            local_socket.connected(door.local_name)
        assert await answered(door, Pool(door.address, door.local_name)) is socket.AF_INET


async def test_tcp_is_used_when_the_line_of_connections_is_full() -> None:
    listener, name = local_socket.named()
    listener.listen(0)
    with listener, local_socket.connected(name):
        with pytest.raises(BlockingIOError):
            local_socket.connected(name)
        async with opened(echo) as door:
            assert await answered(door, Pool(door.address, name)) is socket.AF_INET


async def test_a_name_ends_with_its_server() -> None:
    async with opened(echo) as door:
        name = door.local_name
        assert name not in repr(door)
    with pytest.raises(ConnectionRefusedError):
        local_socket.connected(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root")
def test_a_name_is_unknown_in_other_network_namespaces() -> None:
    """As 127.0.0.1 is another machine's there. Nodes may share files, and Pods their node's kernel."""
    listener, name = local_socket.named()
    with listener:
        listener.listen()
        local_socket.connected(name).close()
        script = f"from workers.http1 import local_socket; local_socket.connected({name!r})"
        command = ["unshare", "--net", sys.executable, "-c", script]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "ConnectionRefusedError" in found.stderr
