"""The front door alone: Ray's own configuration, our program and HAProxy itself, in front of a test's
servers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions

from controlplane.runtime.front_door.sign_of_life import SignOfLife
from testkit.redis_server import free_port

GIVE_UP_S = 60.0
FALLBACK = "SERVE_PROXY_ACTOR-fallback-1c8d80656f88454f61f9e0197b827e4a"


def written_by_ray(folder: Path, port: int, gateways: Sequence[int], host: str = "127.0.0.1") -> Path:
    """The configuration that Ray Serve writes for an application with gateways at these ports of this
    machine; without ports, for an application that has not started."""
    servers = [ServerConfig(f"SERVE_REPLICA_ostinato-Gateway-{p}", "127.0.0.1", p) for p in gateways]
    backend = BackendConfig(
        name="http-ostinato",
        path_prefix="/",
        servers=servers,
        app_name="ostinato",
        ingress_deployment_name="Gateway",
        fallback_server=ServerConfig(FALLBACK, "127.0.0.1", 1),
    )
    config = HAProxyConfig(
        http_options=HTTPOptions(host=host, port=port),
        socket_path=str(folder / "admin.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "server-state"),
        metrics_socket_path=str(folder / "metrics.sock"),
        is_head=True,
    )
    api = HAProxyApi(config, {"http-ostinato": backend} if gateways else {}, str(folder / "haproxy.cfg"))
    config.has_received_routes = config.has_received_servers = bool(gateways)
    api._generate_config_file_internal()
    return folder / "haproxy.cfg"


@dataclass(frozen=True)
class Door:
    """A running front door."""

    port: int
    folder: Path
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def front_door(gateways: Sequence[int]) -> Iterator[Door]:
    with tempfile.TemporaryDirectory(prefix="door-") as name:
        folder, port = Path(name), free_port()
        config = written_by_ray(folder, port, gateways)
        with started(config) as process:
            yield Door(port, folder, process)


@contextlib.contextmanager
def started(config: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Our program, as Ray starts it, after it became HAProxy and listens on its admin socket."""
    command = [
        sys.executable,
        "-m",
        "controlplane.runtime.front_door.haproxy",
        "-db",
        "-f",
        str(config),
        "-dR",
    ]
    with (config.parent / "stderr.log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log)
    try:
        until_s = time.monotonic() + GIVE_UP_S
        while not (config.parent / "admin.sock").exists():
            assert process.poll() is None, (config.parent / "stderr.log").read_text()
            assert time.monotonic() < until_s, "HAProxy did not start"
            time.sleep(0.02)
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


Gateway = Callable[[str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def gateway(answer: Gateway) -> AsyncIterator[int]:
    """A server that gives HAProxy its sign of life. It answers /head with the request's head, and others
    by `answer` of their first line, once their head was read. Its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                first = head.split(b"\r\n")[0].decode()
                if first.startswith("GET /head "):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(head), head))
                else:
                    await answer(first, reader, writer)
                await writer.drain()

    server, life = await _listening(serve)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        life.close()
        server.close()


async def _listening(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> tuple[asyncio.Server, SignOfLife]:
    """A server at a port whose sign of life also has a free port."""
    for _ in range(50):
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        try:
            return server, SignOfLife("127.0.0.1", server.sockets[0].getsockname()[1])
        except OSError:
            server.close()
    raise RuntimeError("no port was free 50 above another free one")


async def asked(port: int, request: bytes) -> bytes:
    """All received bytes until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    found = await asyncio.wait_for(reader.read(), GIVE_UP_S)
    writer.close()
    return found
