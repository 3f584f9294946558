"""Hostile bodies to a real engine (vLLM on a CPU, SmolLM2's first layers, an adapter).

    python -m benchmarks.fuzzing.bodies \\
        --count 100000 --out benchmarks/results/fuzzing_bodies.json

Each is drawn from a seed (testkit/fuzz/hostile_bodies.py) by vLLM's description of requests and the fields
of the other versions that we support, passes what a gateway checks, and goes to a worker, ROWS at once. None
may end with a 5xx, or bring a field that the table of fields does not name; two other tenants and good ones
must be answered, the engine must go on, and its processes may take MEMORY_BYTES more. CHUNK bodies go to one
engine, then to a fresh one. Delays of the two tenants are told next to those without these bodies.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import rehearsing
from benchmarks.fuzzing import campaigns
from benchmarks.fuzzing.campaigns import Campaign
from benchmarks.hardening.probing import ms
from testkit.fuzz import hostile_bodies
from testkit.fuzz.hostile_bodies import Found
from workers.bundled import smollm2

CHUNK = 20_000
ROWS = 2
ALONE_S = 30.0
SHOWN = 20


def campaign(seeds: range) -> Found:
    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        folder = Path(name).resolve()
        model = smollm2.ensure(folder / "models", lambda line: None)
        with hostile_bodies.serving(folder, model) as (served, loop):
            alone_s = min(ALONE_S, len(seeds) / 100)
            asking = hostile_bodies.ask_with_others(served, seeds, ROWS, alone_s)
            return asyncio.run_coroutine_threadsafe(asking, loop).result()


def main(argv: Sequence[str] | None = None) -> int:
    many = Campaign("benchmarks.fuzzing.bodies", __doc__, 100_000, CHUNK)
    return campaigns.run(many, campaign, Found(), _summary, _said, argv)


def _said(count: int, found: Found) -> str:
    return f"{found.codes.total()} of {count}: {len(found.broken)} broken {found.broken[-1:]}"


def _summary(command: str, seed: int, found: Found, began_s: float) -> dict[str, Any]:
    return {
        "command": command,
        "first_seed": seed,
        "bodies": found.codes.total() + len(found.broken),
        "codes": dict(found.codes.most_common()),
        "fields_that_passed": dict(sorted(found.passed.items())),
        "growth_mib": round(found.growth_bytes / 2**20, 1),
        "compiling_grammars_mib": round(found.grammar_bytes / 2**20, 1),
        "others_alone": ms(found.alone_s),
        "others_beside": ms(found.beside_s),
        "broken": len(found.broken),
        "first_broken": found.broken[:SHOWN],
        "slowest_s": round(found.slowest_s, 3),
        "slowest_seed": found.slowest_seed,
        "seconds": round(time.monotonic() - began_s, 1),
    }


def rehearse(folder: Path) -> None:
    """Three hundred bodies: it is the test of what a worker and a gateway make of them, too."""
    out = folder / "bodies.json"
    assert main(["--out", str(out), "--count", "300"]) == 0, out.read_text()
    found = rehearsing.check(out, "bodies", "codes")
    assert min(found["codes"][code] for code in ("ok", "invalid_request")) > 0


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
