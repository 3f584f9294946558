"""Hostile requests to a gateway over raw sockets, and what becomes of it.

    python -m benchmarks.fuzzing.requests \\
        --count 1000000 --out benchmarks/results/fuzzing_requests.json

Each is drawn from a seed (testkit/fuzz/hostile_requests.py) by what /openapi.json says. None may be answered
with a 5xx, but 503 and 504 where the state is the reason; the gateway must go on, with at most 256 MiB more
than before. CHUNK requests go to one installation (gateway, controller and echo engines in one process), then
to a fresh one.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import rehearsing
from benchmarks.fuzzing import campaigns
from benchmarks.fuzzing.campaigns import Campaign
from testkit.fuzz import hostile_http
from testkit.fuzz.hostile_http import Found

CHUNK = 10_000
SHOWN = 20


def campaign(seeds: range) -> Found:
    with tempfile.TemporaryDirectory(prefix="hostile-") as name, hostile_http.served(Path(name)) as gateway:
        return hostile_http.ask(gateway, seeds)


def main(argv: Sequence[str] | None = None) -> int:
    many = Campaign("benchmarks.fuzzing.requests", __doc__, 1_000_000, CHUNK)
    return campaigns.run(many, campaign, Found(), _summary, _said, argv)


def _said(count: int, found: Found) -> str:
    return f"{found.statuses.total()} of {count}: {len(found.broken)} broken {found.broken[-1:]}"


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
