"""Heads without end and bodies that do not come, at the API and at an engine's door."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import psutil

from benchmarks.hardening.probing import Probe
from benchmarks.live.groups import Running
from benchmarks.live.memory import MIB

Address = tuple[str, int]
LIMIT_S = 60.0  # no client is awaited for longer than this
REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"


@dataclass(frozen=True)
class Sizes:
    header_bytes: int = 1 << 30
    headers: int = 10_000
    connections: int = 2_000


def measure(running: Running, sizes: Sizes) -> list[dict[str, Any]]:
    """A row for each attack at each address."""
    host = urlsplit(running.cluster.url)
    addresses = {"API": ("127.0.0.1", host.port or 80), "door": _worker_address(running)}
    attacks: dict[str, Callable[[Address], Any]] = {
        f"one header of {sizes.header_bytes} bytes": lambda at: _long_header(at, sizes.header_bytes),
        f"{sizes.headers} headers": lambda at: _many_headers(at, sizes.headers),
        f"{sizes.connections} slow heads": lambda at: _many(at, sizes.connections, REQUEST + b"X: "),
        f"{sizes.connections} slow bodies": lambda at: _many(
            at,
            sizes.connections,
            REQUEST + b"Content-Length: 1000\r\nContent-Type: application/json\r\n\r\n{",
        ),
    }
    return [
        {"at": name, "attack": what, **_under(running, attack, at)}
        for name, at in addresses.items()
        for what, attack in attacks.items()
    ]


def _worker_address(running: Running) -> Address:
    """Where an engine's worker listens."""
    (pid, *_) = running.engine_pids()
    ports = sorted(
        c.laddr.port for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN
    )
    for port in ports:
        if asyncio.run(_answers(port)):
            return "127.0.0.1", port
    raise RuntimeError(f"expected a door among the ports {ports} of the worker {pid}")


async def _answers(port: int) -> bool:
    """The bytes that a worker's server takes from an unknown client."""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /load HTTP/1.1\r\nHost: x\r\n\r\n")
            head = await reader.read(64)
            writer.close()
            return head.startswith((b"HTTP/1.1 401", b"HTTP/1.1 403", b"HTTP/1.1 404"))
    return False


def _under(running: Running, attack: Callable[[Address], Any], at: Address) -> dict[str, Any]:
    processes = running.processes()
    before = _resident(processes)
    probe = Probe(running.cluster.url, ("GET", "/healthz", None), keeps=False)
    largest = dict(before)
    with probe:
        told = asyncio.run(_sampled(attack(at), processes, largest))
    grown = max(processes, key=lambda p: largest.get(p, 0) - before.get(p, 0))
    return {
        **told,
        "healthz": probe.summary(),
        "most_grown": " ".join(_title(grown).split()[:2]),
        "grown_mib": round((largest.get(grown, 0) - before.get(grown, 0)) / MIB, 1),
    }


async def _sampled(
    attack: Any, processes: Sequence[psutil.Process], largest: dict[psutil.Process, int]
) -> dict[str, Any]:
    task = asyncio.ensure_future(attack)
    while not task.done():
        for process, size in (await asyncio.to_thread(_resident, processes)).items():
            largest[process] = max(size, largest.get(process, 0))
        await asyncio.wait({task}, timeout=0.25)
    found: dict[str, Any] = task.result()
    return found


def _resident(processes: Sequence[psutil.Process]) -> dict[psutil.Process, int]:
    found = {}
    for process in processes:
        with suppress(psutil.Error):
            found[process] = process.memory_info().rss
    return found


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return "ended"


async def _long_header(at: Address, size: int) -> dict[str, Any]:
    piece = b"a" * (1 << 20)
    return await _sent(at, [REQUEST + b"X: ", *(piece for _ in range(size >> 20)), b"\r\n\r\n"])


async def _many_headers(at: Address, count: int) -> dict[str, Any]:
    return await _sent(at, [REQUEST, *(b"X-%d: a\r\n" % number for number in range(count)), b"\r\n"])


async def _sent(at: Address, pieces: Sequence[bytes]) -> dict[str, Any]:
    """The number of bytes taken before the connection was closed, and the answer."""
    began_s, taken, head = time.monotonic(), 0, b""
    reader, writer = await asyncio.open_connection(*at)
    with suppress(OSError):
        async with asyncio.timeout(LIMIT_S):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                taken += len(piece)
            head = await reader.read(64)
            while await reader.read(4096):
                pass
    with suppress(OSError, TimeoutError):
        head = head or await asyncio.wait_for(reader.read(64), 1)
    writer.close()
    return {
        "closed_after_s": round(time.monotonic() - began_s, 2),
        "sent_bytes": taken,
        "answer": head.split(b"\r\n")[0].decode("latin-1"),
    }


async def _many(at: Address, count: int, begin: bytes) -> dict[str, Any]:
    """Each sends a byte a second after this beginning."""
    ended: list[float] = []
    refused = 0
    answers: dict[str, int] = {}

    async def one() -> None:
        nonlocal refused
        began_s = time.monotonic()
        try:
            reader, writer = await asyncio.open_connection(*at)
        except OSError:
            refused += 1
            return
        first = b""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(LIMIT_S):
                first = await _dripping(reader, writer, begin)
        writer.close()
        ended.append(time.monotonic() - began_s)
        line = first.split(b"\r\n")[0].decode("latin-1")
        answers[line] = answers.get(line, 0) + 1

    await asyncio.gather(*(one() for _ in range(count)))
    return {
        "connections": count,
        "refused": refused,
        "answers": answers,
        "closed_after_s": round(max(ended, default=0.0), 2),
    }


async def _dripping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, begin: bytes) -> bytes:
    """Read until the other side closes; its first answer."""
    reading = asyncio.ensure_future(_whole(reader))
    writer.write(begin)
    while not reading.done():
        await asyncio.wait({reading}, timeout=1.0)
        if not reading.done():
            writer.write(b"a")
    return reading.result()


async def _whole(reader: asyncio.StreamReader) -> bytes:
    first = b""
    with suppress(OSError):
        while piece := await reader.read(4096):
            first = first or piece
    return first
