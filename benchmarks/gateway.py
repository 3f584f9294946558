"""What the product's path adds to an instant engine, next to a bare Ray Serve handler.

    python -m benchmarks.gateway [--rounds 15]

Both sides of a comparison answer the same requests on the same machine in one run, in short turns, through
the same load generator (which shares the machine's cores: requests/s are of the machine, not of the server).
The result also holds microseconds of CPU per request in each process, which other work on the machine
disturbs less. Writes benchmarks/results/gateway.json and prints a table.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from benchmarks import gpu_engine, rehearsing
from benchmarks.process_cpu import ClusterCpu
from benchmarks.serving.settings import SHAPES
from controlplane.client.client import Client
from controlplane.management.schemas.deploy import DeployModelRequest, EngineForm
from controlplane.management.schemas.models import RegisterModelRequest
from controlplane.runtime import local
from controlplane.settings import Settings

RESULT = rehearsing.RESULTS / "gateway.json"
MODEL = "smollm2-135m-instruct"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Side:
    """One server under test."""

    name: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Load:
    """`concurrency` clients, each of which sends its next request when it has its answer. With
    `offered_per_s`, requests are sent at random times at this mean rate instead, on as many connections."""

    concurrency: int
    requests: int
    offered_per_s: float = 0.0


# Short ones, many times: other work on the machine then meets both sides alike.
ECHO_LOADS = [Load(1, 300), Load(8, 800), Load(32, 800)]
REHEARSED_LOADS = [Load(1, 4), Load(4, 8)]
# The part of the peer's highest rate that is offered to both sides. Near that rate a p50 is mostly a queue.
OFFERED = 0.5


_CPU = "cpu_us_"
Used = Callable[[], Mapping[str, float]]


def _nothing() -> Mapping[str, float]:
    return {}


async def measure(side: Side, load: Load, used: Used = _nothing) -> dict[str, float]:
    """Latencies and throughput of `load.requests` requests, `load.concurrency` at a time; and the CPU time of
    each process, from `used` (seconds so far), in microseconds per request."""
    connector = aiohttp.TCPConnector(limit=load.concurrency)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def ask() -> float:
            start = time.perf_counter()
            async with session.post(side.url, json=side.body) as response:
                text = await response.read()
                assert response.status == 200, (response.status, text[:300])
            return time.perf_counter() - start

        before = used()
        start = time.perf_counter()
        latencies = await (_at_rate(ask, load) if load.offered_per_s else _in_turns(ask, load))
        wall_s = time.perf_counter() - start
        after = used()
    ordered = sorted(latencies)
    return {
        "p50_ms": 1e3 * ordered[len(ordered) // 2],
        "p99_ms": 1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "requests_per_s": load.requests / wall_s,
        **{_CPU + part: 1e6 * (after[part] - before[part]) / load.requests for part in before},
    }


Ask = Callable[[], Coroutine[Any, Any, float]]


async def _in_turns(ask: Ask, load: Load) -> list[float]:
    todo = iter(range(load.requests))

    async def client() -> list[float]:
        return [await ask() for _ in todo]

    found = await asyncio.gather(*(client() for _ in range(load.concurrency)))
    return [latency for each in found for latency in each]


async def _at_rate(ask: Ask, load: Load) -> list[float]:
    """Poisson arrivals; the same ones for both sides."""
    random, due_s, asked = Random(0), time.perf_counter(), []
    for _ in range(load.requests):
        due_s += random.expovariate(load.offered_per_s)
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        asked.append(asyncio.create_task(ask()))
    return list(await asyncio.gather(*asked))


def compare(
    ours: Side, peer: Side, loads: list[Load], rounds: int, used: Used = _nothing
) -> list[dict[str, Any]]:
    """Rounds of both sides in turns; the median of each figure, and of the differences per round."""
    rows = []
    for load in loads:
        for side in (peer, ours):  # warm connections, handles and caches
            asyncio.run(measure(side, replace(load, requests=max(10, load.requests // 5))))
        pairs = []
        for i in range(rounds):
            order = (peer, ours) if i % 2 == 0 else (ours, peer)
            found = {side.name: asyncio.run(measure(side, load, used)) for side in order}
            pairs.append((found[ours.name], found[peer.name]))
        rows.append(_row(ours, peer, load, pairs))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def _row(
    ours: Side, peer: Side, load: Load, pairs: list[tuple[dict[str, float], dict[str, float]]]
) -> dict[str, Any]:
    def median(pick: Callable[[dict[str, float], dict[str, float]], float]) -> float:
        return round(statistics.median(pick(a, b) for a, b in pairs), 3)

    return {
        "ours": ours.name,
        "peer": peer.name,
        "concurrency": load.concurrency,
        "offered_per_s": round(load.offered_per_s),
        "requests_per_round": load.requests,
        "rounds": len(pairs),
        "peer_p50_ms": median(lambda a, b: b["p50_ms"]),
        "ours_p50_ms": median(lambda a, b: a["p50_ms"]),
        "added_p50_ms": median(lambda a, b: a["p50_ms"] - b["p50_ms"]),
        "added_p99_ms": median(lambda a, b: a["p99_ms"] - b["p99_ms"]),
        "peer_requests_per_s": median(lambda a, b: b["requests_per_s"]),
        "ours_requests_per_s": median(lambda a, b: a["requests_per_s"]),
        "requests_per_s_ratio": median(lambda a, b: a["requests_per_s"] / b["requests_per_s"]),
        **_cpu("ours", [a for a, _ in pairs]),
        **_cpu("peer", [b for _, b in pairs]),
    }


def _cpu(name: str, found: list[dict[str, float]]) -> dict[str, Any]:
    """Per request and part of the cluster: the median over rounds."""
    parts = [key for key in found[0] if key.startswith(_CPU)]
    spent = {key.removeprefix(_CPU): round(statistics.median(one[key] for one in found)) for key in parts}
    return {f"{name}_cpu_us_per_request": spent} if spent else {}


@contextmanager
def cluster(sizes: EngineForm | None = None) -> Iterator[local.LocalCluster]:
    """Start a cluster in a temporary home, and deploy the bundled model on the echo engine (in a rehearsal a
    tiny model)."""
    with tempfile.TemporaryDirectory(prefix="ostinato-bench-") as home:
        source = source_in(Path(home))
        chosen = {"home": Path(home), "http_port": local.free_port(), "engine": "echo"}
        chosen |= {"allowed_roots": home} if rehearsing.is_rehearsal() else {}
        settings = Settings.model_validate({**Settings().model_dump(), **chosen})
        try:
            running = local.up(settings, print)
            with Client(running.url) as client:
                registering = client.register_model(RegisterModelRequest(model=MODEL, source=source))
                client.wait(registering.id)
                client.wait(client.deploy_model(DeployModelRequest(model=MODEL, engine=sizes)).id)
            yield running
        finally:
            local.down(settings, print)


def source_in(home: Path) -> str:
    if rehearsing.is_rehearsal():
        return str(gpu_engine.write_dummy_base(home / "tiny", SHAPES["tiny"]))
    models = Settings().home / "models"
    models.mkdir(parents=True, exist_ok=True)
    (home / "models").symlink_to(models)
    return f"bundled://{MODEL}"


def echo_against_bare(rounds: int, loads: list[Load]) -> list[dict[str, Any]]:
    """An instant engine behind our whole path, against a bare Serve handler that answers the same bytes."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
    with cluster() as running:
        command = [sys.executable, "-m", "benchmarks.bare_app", running.ray_address]
        switches = local.cluster_environment(Settings(home=Path(running.home)))
        subprocess.run(command, check=True, env=switches)
        ours = Side("ostinato, echo engine", running.url + CHAT, body)
        bare = Side("bare Serve handler behind the same HAProxy", running.url + "/bare", body)
        used = ClusterCpu(running).seconds
        rows = compare(ours, bare, loads, rounds, used)
        half = OFFERED * max(row["peer_requests_per_s"] for row in rows)
        return rows + compare(ours, bare, [replace(loads[-1], offered_per_s=half)], rounds, used)


COLUMNS = {
    "ours": "{}",
    "peer": "{}",
    "concurrency": "{}",
    "offered_per_s": "{}",
    "peer_p50_ms": "{:.2f}",
    "ours_p50_ms": "{:.2f}",
    "added_p50_ms": "{:.2f}",
    "added_p99_ms": "{:.2f}",
    "peer_requests_per_s": "{:.0f}",
    "ours_requests_per_s": "{:.0f}",
    "requests_per_s_ratio": "{:.2f}",
}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"| {' | '.join(c.replace('_', ' ') for c in COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {' | '.join(form.format(row[c]) for c, form in COLUMNS.items())} |" for row in rows]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = rehearsing.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args(argv)
    loads = REHEARSED_LOADS if rehearsing.is_rehearsal() else ECHO_LOADS
    rows = echo_against_bare(args.rounds, loads)
    result = {
        "command": rehearsing.command("benchmarks.gateway", argv),
        "machine": rehearsing.machine(),
        "rows": rows,
    }
    rehearsing.write_result(args.out, result)
    print(table(rows))


def rehearse(folder: Path) -> None:
    """A cluster whose engine echoes, against the bare handler: a few requests, one round."""
    out = folder / "gateway.json"
    main(["--rounds", "1", "--out", str(out)])
    assert len(rehearsing.check(out)["rows"]) == len(REHEARSED_LOADS) + 1


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
