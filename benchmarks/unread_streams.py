"""Clients that ask for long streams and never read them: how much memory that takes, and when they are cut.

    python -m benchmarks.unread_streams [--streams 1000] [--megabytes 8]

Opens many connections to a product of its own with the echo engine, asks a long stream on each and reads
nothing. Writes benchmarks/results/unread_streams.json: memory of the proxy and the gateway before, and each
second; when each connection was cut; how the gateway counted the requests.
"""

from __future__ import annotations

import json
import re
import select
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from benchmarks import rehearsing
from benchmarks.gateway import MODEL, cluster
from benchmarks.process_cpu import ClusterCpu
from controlplane.api.request_limits import WRITE_TIMEOUT_S
from controlplane.management.schemas.deploy import EngineForm
from controlplane.runtime.local import LocalCluster

RESULT = rehearsing.RESULTS / "unread_streams.json"
# An event of a stream with the 20 most likely tokens has about as many bytes. A gateway of one core passes
# some megabytes a second of small events: the unread streams would show late.
WORD = 2000 * "a"
PARTS = ("proxy", "gateway", "worker")
MIB = 1 << 20
# A client's own buffer in the kernel, which would else grow by what it may have.
CLIENT_BYTES = 16 << 10
PATIENCE_S = 120.0
COUNTED = re.compile(r'^ostinato_requests_total\{code="(\w+)",model="[^"]*"\} ([0-9.]+)', re.MULTILINE)


def sizes_for(streams: int) -> EngineForm:
    """The engine has as many places as there are streams: then none of them waits for its turn."""
    return EngineForm(contextTokens=64, requestsAtOnce=max(16, streams))


def request_of(size_bytes: int) -> bytes:
    body = {"model": MODEL, "prompt": WORD, "stream": True, "min_tokens": size_bytes // len(WORD)}
    sent = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(sent)}\r\n"
    return head.encode() + b"content-type: application/json\r\n\r\n" + sent


def opened(url: str, request: bytes) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CLIENT_BYTES)
    made.connect((host, int(port)))
    made.sendall(request)
    return made


class Streams:
    """Connections of which nothing is read. `cut_s`: after how long each one's end was seen."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._opened_s: dict[int, float] = {}
        self.cut_s: list[float] = []

    def add(self, connection: socket.socket) -> None:
        self._opened_s[connection.fileno()] = time.monotonic()
        self._poll.register(connection, select.POLLRDHUP)

    @property
    def open(self) -> int:
        return len(self._opened_s)

    def look(self, wait_s: float) -> None:
        """Wait for this time, and note which streams ended."""
        until_s = time.monotonic() + wait_s
        while (left_s := until_s - time.monotonic()) > 0:
            for number, _ in self._poll.poll(1000 * left_s):
                self._poll.unregister(number)
                self.cut_s.append(time.monotonic() - self._opened_s.pop(number))


def measure(running: LocalCluster, streams: int, size_bytes: int) -> dict[str, Any]:
    memory = ClusterCpu(running)
    idle, request, asked = memory.resident_bytes(), request_of(size_bytes), Streams()
    most, began_s, seconds = dict(idle), time.monotonic(), []
    with ExitStack() as stack:
        for i in range(streams):
            asked.add(stack.enter_context(opened(running.url, request)))
            if i % 100 == 99:
                most = _larger(most, memory.resident_bytes())
        opened_s = time.monotonic() - began_s
        while asked.open and time.monotonic() - began_s < PATIENCE_S:
            asked.look(1.0)
            now = memory.resident_bytes()
            most = _larger(most, now)
            seconds.append({"after_s": round(time.monotonic() - began_s, 1), "open": asked.open, **_mib(now)})
            print(json.dumps(seconds[-1]), flush=True)
        left = asked.open
    cut = sorted(asked.cut_s)
    return {
        "streams": streams,
        "stream_bytes": size_bytes,
        "opened_within_s": round(opened_s, 2),
        "idle_mib": _mib(idle),
        "most_above_idle_mib": _mib({part: most[part] - idle[part] for part in most}),
        "closed_after_s": {"first": cut[0], "median": cut[len(cut) // 2], "last": cut[-1]} if cut else {},
        "not_closed": left,
        "counted": counted(running.url, streams),
        "seconds": seconds,
    }


def counted(url: str, streams: int) -> dict[str, int]:
    """The gateway's counts of the requests, once it has counted all."""
    until_s = time.monotonic() + PATIENCE_S
    found: dict[str, int] = {}
    while sum(found.values()) < streams and time.monotonic() < until_s:
        page = httpx.get(url + "/metrics", timeout=PATIENCE_S, trust_env=False).text
        found = {code: int(float(count)) for code, count in COUNTED.findall(page)}
        time.sleep(0.2)
    return found


def _larger(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {part: max(size, other[part]) for part, size in one.items()}


def _mib(sizes: dict[str, int]) -> dict[str, float]:
    return {part: round(sizes[part] / MIB, 1) for part in PARTS if part in sizes}


def main(argv: Sequence[str] | None = None) -> None:
    parser = rehearsing.parser(__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--megabytes", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args(argv)
    with cluster(sizes_for(given.streams)) as running:
        found = measure(running, given.streams, int(given.megabytes * 1e6))
    result = {
        "command": rehearsing.command("benchmarks.unread_streams", argv),
        "machine": rehearsing.machine(),
        "write_timeout_s": WRITE_TIMEOUT_S,
        **found,
    }
    rehearsing.write_result(given.out, result)
    print(json.dumps({name: value for name, value in result.items() if name != "seconds"}, indent=1))


def rehearse(folder: Path) -> None:
    """A few streams, which are cut soon."""
    out = folder / "unread_streams.json"
    main(["--streams", "4", "--megabytes", "8", "--out", str(out)])
    found = rehearsing.check(out, "counted", "idle_mib")
    # A client that reads nothing sees no end of its connection: unread bytes come before it.
    # A proxy that was quicker on a busy machine looks like a client that left.
    assert sum(found["counted"].values()) == 4
    assert found["counted"].keys() <= {"cut", "client_disconnected"}


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
