"""The measurements of a real system; and how they are written and read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.serving.workload import arrivals
from benchmarks.simulator_reality.calibrating import step_times
from benchmarks.simulator_reality.loads import Load
from benchmarks.simulator_reality.seeing import Seen, seen_of
from benchmarks.simulator_reality.types import Asked, Facts, Play, Timed, VariantFacts
from profiler.step_time.steps import prefill_curve_s

Lengths = Sequence[tuple[int, int]]  # (prompt, output)


@dataclass(frozen=True)
class Workload:
    """Poisson arrivals at the share `load` of what the engines can do, all models alike, these lengths.

    A rehearsal sets `max_per_s`: its engines do next to nothing, so that what they can do is noise.
    """

    load: float
    seconds: float
    lengths: Lengths
    seed: int = 1
    max_per_s: float = math.inf


@dataclass(frozen=True)
class Measured:
    facts: Facts
    seen: Mapping[str, Sequence[Seen]]  # by where they are from
    rate: float
    asked: Sequence[Asked]
    timed: Sequence[Timed]


async def measure(play: Play, facts: Facts, work: Workload, repeats: int) -> Measured:
    """Loads of known composition, then the workload. Variants are in slots by then."""
    seen = await seen_of(play, facts, repeats)
    rate = min(work.max_per_s, work.load * most_per_s(facts, seen, work.lengths))
    asked = poisson(facts, work, rate)
    print(f"{len(asked)} requests, {rate:.2f}/s", flush=True)
    return Measured(facts, {"measured": seen}, rate, asked, await play(asked))


def most_per_s(facts: Facts, seen: Sequence[Seen], lengths: Lengths) -> float:
    """About how many requests all engines answer a second when all rows are busy."""
    model, _ = step_times(facts, seen)
    step_s = model[0].decode_s[facts.rows]
    each_s = [
        prefill_curve_s(model[0], float(prompt)) + output * step_s / facts.rows for prompt, output in lengths
    ]
    return facts.groups / float(np.mean(each_s))


def poisson(facts: Facts, work: Workload, rate: float) -> list[Asked]:
    times = arrivals(rate, work.seconds, 1.0, np.random.default_rng([work.seed, 0]))
    rng = np.random.default_rng([work.seed, 1])
    models = rng.integers(1 + len(facts.variants), size=len(times))
    picked = rng.integers(len(work.lengths), size=len(times))
    return [
        Asked(round(float(at_s), 6), int(model), *work.lengths[int(which)])
        for at_s, model, which in zip(times, models, picked, strict=True)
    ]


def as_json(measured: Measured) -> dict[str, Any]:
    return {
        "facts": asdict(measured.facts),
        "rate": round(measured.rate, 4),
        "seen": {
            source: [
                {**asdict(one.load), "ttft_s": one.ttft_s, "tpot_s": one.tpot_s, "step_s": one.step_s}
                for one in seen
            ]
            for source, seen in measured.seen.items()
        },
        "columns": "at_s model prompt output ttft_s tpot_s total_s",
        "requests": [
            f"{a.at_s} {a.model} {a.prompt} {a.output} {t.ttft_s:.6f} {t.tpot_s:.6f} {t.total_s:.6f}"
            for a, t in zip(measured.asked, measured.timed, strict=True)
        ],
    }


def from_json(record: Mapping[str, Any]) -> Measured:
    facts = {**record["facts"], "variants": tuple(VariantFacts(**v) for v in record["facts"]["variants"])}
    seen = {source: [_seen(row) for row in rows] for source, rows in record["seen"].items()}
    asked, timed = [], []
    for line in record["requests"]:
        at_s, model, prompt, output, *times = line.split()
        asked.append(Asked(float(at_s), int(model), int(prompt), int(output)))
        timed.append(Timed(*map(float, times)))
    return Measured(Facts(**facts), seen, record["rate"], asked, timed)


def _seen(row: Mapping[str, Any]) -> Seen:
    beside = row.get("beside")
    load = Load(
        row["rows"],
        row["prompt"],
        row["output"],
        tuple(row["models"]),
        (beside[0], beside[1]) if beside else None,
    )
    return Seen(load, row["ttft_s"], row["tpot_s"], row.get("step_s", 0.0))
