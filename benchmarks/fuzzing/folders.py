"""Hostile folders of models, adapters and deltas, and what registration makes of each.

    python -m benchmarks.fuzzing.folders --count 100000 \\
        --out benchmarks/results/fuzzing_folders.json

Each is drawn from a seed (testkit/fuzz/hostile_folders.py), read in this process, where an unexpected error
shows, and one in SAMPLE by the controller's reader. Each must end as Ready or as a refusal (4xx), within 5 s
of CPU time and 256 MiB of memory beyond those before the first.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import rehearsing
from benchmarks.fuzzing import campaigns
from benchmarks.fuzzing.campaigns import Campaign
from controlplane.controller.child_process import ReaderDied
from controlplane.controller.file_reader import FileReader
from testkit.fuzz import hostile_folders as hostile

SAMPLE = 50
CHUNK = 2_000
SHOWN = 20


@dataclass
class Found:
    """Findings of some seeds. `broken` has the seed, the change, and the failed expectation."""

    outcomes: Counter[str] = field(default_factory=Counter)
    by_reader: Counter[str] = field(default_factory=Counter)
    broken: list[dict[str, Any]] = field(default_factory=list)
    most_cpu_s: float = 0.0
    most_cpu_seed: int = -1
    growth_bytes: int = 0

    def add(self, other: Found) -> None:
        self.outcomes += other.outcomes
        self.by_reader += other.by_reader
        self.broken += other.broken
        if other.most_cpu_s > self.most_cpu_s:
            self.most_cpu_s, self.most_cpu_seed = other.most_cpu_s, other.most_cpu_seed
        self.growth_bytes = max(self.growth_bytes, other.growth_bytes)


def campaign(seeds: range) -> Found:
    """In a process of its own, for its memory is looked at."""
    found, reader = Found(), FileReader()
    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        sound = hostile.sound(Path(name).resolve())
        before = hostile.peak_memory()
        for seed in seeds:
            with hostile.drawn(sound, seed) as case:
                began_s = time.process_time()
                _look(found.outcomes, found, seed, case, hostile.in_this_process(sound, case), before)
                if (took_s := time.process_time() - began_s) > found.most_cpu_s:
                    found.most_cpu_s, found.most_cpu_seed = took_s, seed
                if seed % SAMPLE == 0:
                    _look(found.by_reader, found, seed, case, by(reader, sound, case), before)
        found.growth_bytes = hostile.peak_memory() - before
    reader.close()
    return found


def by(reader: FileReader, sound: hostile.Seeds, case: hostile.Case) -> Any:
    def read() -> Any:
        try:
            return reader.read_now(case.model, case.base, hostile.limits_of(sound), Path)
        except ReaderDied as e:
            raise hostile.Broken(f"the reader died: {e}") from e

    return read


def _look(counts: Counter[str], found: Found, seed: int, case: hostile.Case, read: Any, before: int) -> None:
    try:
        counts[hostile.outcome(case, read, before + hostile.MEMORY_BYTES)] += 1
    except hostile.Broken as e:
        counts["broken"] += 1
        found.broken.append({"seed": seed, "changes": case.changes, "what": str(e)})


def main(argv: Sequence[str] | None = None) -> int:
    many = Campaign("benchmarks.fuzzing.folders", __doc__, 100_000, CHUNK)
    return campaigns.run(many, campaign, Found(), _summary, _said, argv)


def _said(count: int, found: Found) -> str:
    return f"{found.outcomes.total()} of {count}: {dict(found.outcomes)}"


def _summary(command: str, seed: int, found: Found, began_s: float) -> dict[str, Any]:
    return {
        "command": command,
        "first_seed": seed,
        "folders": found.outcomes.total(),
        "outcomes": dict(found.outcomes.most_common()),
        "by_the_reader": dict(found.by_reader.most_common()),
        "broken": len(found.broken),
        "first_broken": found.broken[:SHOWN],
        "most_cpu_s": round(found.most_cpu_s, 3),
        "most_cpu_seed": found.most_cpu_seed,
        "growth_mib": round(found.growth_bytes / 2**20, 1),
        "seconds": round(time.monotonic() - began_s, 1),
    }


def rehearse(folder: Path) -> None:
    """A hundred folders."""
    out = folder / "folders.json"
    assert main(["--out", str(out), "--count", "100"]) == 0
    rehearsing.check(out, "folders", "outcomes", "by_the_reader")


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
