"""Placement against brute force over all ordered choices of GPUs and all splits, on small random instances.

    PYTHONPATH=tests python -m benchmarks.placement_orders --out benchmarks/results/placement_orders.json

Two to five GPUs of several kinds, loads and NVLink domains, large tables, tied or not; every intent; a third
with a limit on latency, TTFT or TPOT that is just met or just not. Counted: refusals of what fits, placements
of what does not, relaxations of what needs none, and how far an objective is above the least.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from placement_brute_force import best, instance
from solver_instances import Pausing

from benchmarks import rehearsing
from placement.solver.cluster import Cluster
from placement.solver.decide import decide
from placement.solver.estimators import estimator_of
from placement.solver.policies.base import EstimatorFor
from placement.solver.policies.joint import Joint
from placement.solver.request import Request
from placement.types import Constraint, Placement

ESTIMATORS: dict[str, EstimatorFor] = {"roofline": estimator_of, "pausing": Pausing}
LIMITS = ("latency_s", "ttft_s", "tpot_s")
REFUSALS = 20  # one in so many is also asked what would do: that takes long


@dataclass(frozen=True)
class Verdict:
    """Of one instance. `gap`: relative, above the least objective; None where nothing fits."""

    seed: int
    intent: str
    gap: float | None
    false_refusal: bool = False
    impossible: bool = False
    needless: bool = False


def verdict(seed: int) -> Verdict:
    rng = random.Random(seed)
    cluster, request = instance(rng)
    name = rng.choice(tuple(ESTIMATORS))
    request = _limited(rng, cluster, request, ESTIMATORS[name])
    found = Joint().find(cluster, request, ESTIMATORS[name])
    least = best(cluster, request, ESTIMATORS[name](cluster, request))
    facts = (seed, request.intent.value)
    if found is None:
        needless = seed % REFUSALS == 0 and _needless(cluster, request, ESTIMATORS[name])
        return Verdict(*facts, None, false_refusal=least is not None, needless=needless)
    if least is None:
        return Verdict(*facts, None, impossible=True)
    return Verdict(*facts, found.choice.objective / least - 1)


def _limited(rng: random.Random, cluster: Cluster, request: Request, estimator_for: EstimatorFor) -> Request:
    """One in three with a limit near what its best placement takes."""
    if rng.random() > 1 / 3:
        return request
    placed = Joint().find(cluster, request, estimator_for)
    if placed is None:
        return request
    limit = rng.choice(LIMITS)
    takes = {
        "latency_s": placed.choice.latency_s,
        "ttft_s": placed.estimate.ttft_s,
        "tpot_s": placed.estimate.tpot_s,
    }
    value = takes[limit] * rng.choice((0.9, 0.99, 0.999, 1.001, 1.1))
    return replace(request, slos=replace(request.slos, **{limit: value}))


def _needless(cluster: Cluster, request: Request, estimator_for: EstimatorFor) -> bool:
    """Whether a relaxation is proposed that relaxes nothing."""
    outcome = decide(cluster, request, Joint(), estimator_for)
    if isinstance(outcome, Placement):
        return True
    by_degrees = (one for one in outcome.relaxations if one.constraint is not Constraint.ANTI_AFFINITY)
    return any(one.factor <= 1 for one in by_degrees)


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    gaps: dict[str, list[float]] = defaultdict(list)
    for one in verdicts:
        if one.gap is not None:
            gaps[one.intent].append(one.gap)
    return {
        "instances": len(verdicts),
        "placed": sum(map(len, gaps.values())),
        "false_refusals": [one.seed for one in verdicts if one.false_refusal],
        "impossible": [one.seed for one in verdicts if one.impossible],
        "needless_relaxations": [one.seed for one in verdicts if one.needless],
        "gap_by_intent": {
            intent: {"count": len(values), "mean": statistics.mean(values), "max": max(values)}
            for intent, values in sorted(gaps.items())
        },
        "worst": sorted(((one.gap, one.seed) for one in verdicts if one.gap is not None), reverse=True)[:10],
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--instances", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first instance's number")
    parser.add_argument("--processes", type=int, default=1)
    asked = parser.parse_args(argv)
    command = rehearsing.command("benchmarks.placement_orders", argv)
    seeds, verdicts = range(asked.first, asked.first + asked.instances), []
    with ProcessPoolExecutor(asked.processes, multiprocessing.get_context("spawn")) as pool:
        for one in pool.map(verdict, seeds, chunksize=10):
            verdicts.append(one)
            if len(verdicts) % 500 == 0 or len(verdicts) == asked.instances:
                result = {"command": command, **summary(verdicts)}
                rehearsing.write_result(asked.out, result)
                print(f"{len(verdicts)} of {asked.instances}: {result['worst'][:1]}", flush=True)


def rehearse(folder: Path) -> None:
    """Twelve instances."""
    out = folder / "placement_orders.json"
    main(["--out", str(out), "--instances", "12"])
    rehearsing.check(out, "instances", "gap_by_intent", "worst")


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
