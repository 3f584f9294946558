"""Hostile requests to a gateway over raw sockets, and what becomes of it.

    PYTHONPATH=.:tests:tests/unit:tests/api:tests/fuzz python -m benchmarks.fuzzing.requests \\
        --count 1000000 --out benchmarks/results/fuzzing_requests.json

Each is drawn from a seed (tests/fuzz/hostile_requests.py) by what /openapi.json says. None may be answered
with a 5xx, but 503 and 504 where the state is the reason; the gateway must go on, with at most 256 MiB more
than before. CHUNK requests go to one installation (gateway, controller and echo engines in one process), then
to a fresh one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import hostile_http
from hostile_http import Found

from benchmarks import rehearsing

CHUNK = 10_000
SHOWN = 20


def campaign(seeds: range) -> Found:
    with tempfile.TemporaryDirectory(prefix="hostile-") as name, hostile_http.served(Path(name)) as gateway:
        return hostile_http.ask(gateway, seeds)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--processes", type=int, default=1)
    asked = parser.parse_args(argv)
    command = rehearsing.command("benchmarks.fuzzing.requests", argv)
    ends = asked.seed + asked.count
    parts = [range(at, min(ends, at + CHUNK)) for at in range(asked.seed, ends, CHUNK)]
    found, began_s = Found(), time.monotonic()
    with ProcessPoolExecutor(
        asked.processes, multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        for part in pool.map(campaign, parts):
            found.add(part)
            rehearsing.write_result(asked.out, _summary(command, asked.seed, found, began_s))
            sent = found.statuses.total()
            print(f"{sent} of {asked.count}: {len(found.broken)} broken {found.broken[-1:]}", flush=True)
    return 1 if found.broken else 0


def _summary(command: str, seed: int, found: Found, began_s: float) -> dict[str, Any]:
    routes = sorted(found.by_route.items())
    return {
        "command": command,
        "first_seed": seed,
        "requests": found.statuses.total() + len(found.broken),
        "statuses": {str(status): count for status, count in found.statuses.most_common()},
        "by_route": {route: {str(s): n for s, n in sorted(counts.items())} for route, counts in routes},
        "broken": len(found.broken),
        "first_broken": found.broken[:SHOWN],
        "slowest_s": round(found.slowest_s, 3),
        "slowest_seed": found.slowest_seed,
        "growth_mib": round(found.growth_bytes / 2**20, 1),
        "seconds": round(time.monotonic() - began_s, 1),
    }


def rehearse(folder: Path) -> None:
    """Two hundred requests."""
    out = folder / "requests.json"
    assert main(["--out", str(out), "--count", "200"]) == 0
    rehearsing.check(out, "requests", "statuses", "by_route")


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
