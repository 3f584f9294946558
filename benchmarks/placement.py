"""The quality and speed of placement, and the paper's experiment of section 8.5 by simulation.

    python -m benchmarks.placement --out benchmarks/results/placement.json [--instances 200] [--only gaps]

`gaps`: objectives over the optimum of the exact program on random small instances. `scale`: CPU seconds of a
decision on clusters up to 100,000 GPUs. `paper`: how many of 21 models fit on 8 x 48 GB, by estimates alone.
A plot is written next to the JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import placement_instances as instances
from benchmarks import placement_plot, rehearsing
from controlplane.baselines.placement.exact import Exact
from controlplane.baselines.placement.maveriq import Maveriq, Selection
from placement.solver.cluster import Cluster
from placement.solver.layout import after
from placement.solver.policies.base import Policy
from placement.solver.policies.joint import Joint
from placement.solver.request import Request
from placement.types import Intent, Placement, Slos

POLICIES: tuple[Policy, ...] = (Joint(), *(Maveriq(selection) for selection in Selection))
SIZES = (10, 100, 1000, 10000, 100000)
MAX_MODELS = 300
PAPERS_MODELS = 21


def gaps(count: int) -> dict[str, Any]:
    """Over instances that the exact program can place; a policy that finds nothing there misses it."""
    found: dict[str, list[float]] = {policy.name: [] for policy in POLICIES}
    missed, solved, seconds = dict.fromkeys(found, 0), 0, dict.fromkeys((*found, "exact"), 0.0)
    for seed in range(count):
        rng = random.Random(seed)
        cluster, request = instances.small_cluster(rng), instances.small_request(rng)
        best, took = _timed(partial(Exact().find, cluster, request))
        seconds["exact"] += took
        if best is None:
            continue
        solved += 1
        for policy in POLICIES:
            outcome, took = _timed(partial(policy.find, cluster, request))
            seconds[policy.name] += took
            if outcome is None:
                missed[policy.name] += 1
            else:
                found[policy.name].append(outcome.choice.objective / best.choice.objective - 1)
    return {
        "instances": count,
        "feasible": solved,
        "seconds": seconds,
        "policies": {name: {"missed": missed[name], **_spread(values)} for name, values in found.items()},
    }


def _spread(values: list[float]) -> dict[str, Any]:
    quantiles = np.percentile(values, (50, 90, 100)).tolist()
    names = ("median", "p90", "max")
    return {
        "mean": statistics.mean(values),
        **dict(zip(names, quantiles, strict=True)),
        "gaps": sorted(values),
    }


def scale(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """One decision each for several models and intents, on roomy clusters and on fragments of 2 to 8 GiB.

    Our policy is asked again with limits just below its placement's figures: `limited`, mostly refused.
    """
    rows = []
    for free_gib in (None, (2, 8)):
        for size in sizes:
            models = min(MAX_MODELS, 3 * size)
            cluster = instances.large_cluster(random.Random(size), size, models, free_gib)
            for policy in (POLICIES[0], POLICIES[1]):
                timed = [_timed(partial(policy.find, cluster, request)) for request in _requests()]
                row = {
                    "gpus": size,
                    "models": models,
                    "cluster": "roomy" if free_gib is None else "fragments",
                    "policy": policy.name,
                    **_decisions(timed),
                }
                tight = [] if policy is not POLICIES[0] else [*_limited(outcome for outcome, _ in timed)]
                if tight:
                    row["limited"] = _decisions([_timed(partial(policy.find, cluster, one)) for one in tight])
                rows.append(row)
                print(row, flush=True)
    return rows


def _decisions(timed: Sequence[tuple[Any, float]]) -> dict[str, Any]:
    seconds = [took for _, took in timed]
    return {
        "placed": sum(outcome is not None for outcome, _ in timed),
        "decisions": len(seconds),
        "median_cpu_s": statistics.median(seconds),
        "max_cpu_s": max(seconds),
    }


def _limited(outcomes: Iterable[Placement | None]) -> Iterator[Request]:
    """The requests that were placed, with a limit on TTFT, and with one on TPOT, 2% below what they got."""
    for request, outcome in zip(_requests(), outcomes, strict=True):
        if outcome is not None:
            yield replace(request, slos=Slos(ttft_s=0.98 * outcome.estimate.ttft_s))
            yield replace(request, slos=Slos(tpot_s=0.98 * outcome.estimate.tpot_s))


def _requests() -> Iterator[Request]:
    for name in ("llama-2-7b", "llama-2-13b", "falcon-40b", "llama-2-70b"):
        for goal in (Intent.MIN_COST, Intent.MIN_LATENCY):
            yield Request("new", instances.model(name, "fp16"), goal, rate_per_s=0.5)


def paper(count: int) -> list[dict[str, Any]]:
    """Compare uneven with even stages for the first `count` models: every policy with both, by intent."""
    policies: list[Policy] = [Joint(), Joint(uneven=False)]
    policies += [Maveriq(selection, uneven=uneven) for selection in Selection for uneven in (True, False)]
    rows = []
    for forms in (("fp16", "int8", "int4"), ("fp16",)):
        for goal in Intent if len(forms) > 1 else (Intent.MIN_LATENCY,):
            cluster, requests = instances.paper_cluster(), instances.paper_models(goal, *forms)[:count]
            for policy in policies:
                rows.append({**_row(cluster, requests, policy), "goal": goal, "forms": forms})
                print(rows[-1], flush=True)
    return rows


def _row(cluster: Cluster, requests: list[Request], policy: Policy) -> dict[str, Any]:
    found = []
    for request in requests:
        outcome = policy.find(cluster, request)
        found.append(outcome)
        if outcome is not None:
            cluster = after(cluster, request, outcome)
    placed = [outcome for outcome in found if outcome is not None]
    return {
        "policy": policy.name,
        "fit": len(placed),
        "before_first_failure": found.index(None) if None in found else len(found),
        "throughput_per_s": sum(one.choice.throughput_per_s for one in placed),
        "mean_latency_s": statistics.mean(one.choice.latency_s for one in placed),
    }


def _timed(decide: Callable[[], Any]) -> tuple[Any, float]:
    """The answer, and seconds of CPU: the machine does other things as well."""
    began = time.process_time()
    outcome = decide()
    return outcome, time.process_time() - began


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--only", default="gaps,scale,paper")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="GPUs of the clusters of `scale`")
    parser.add_argument("--models", type=int, default=PAPERS_MODELS, help="how many of the paper's")
    asked = parser.parse_args(argv)
    sizes = [int(size) for size in asked.sizes.split(",")]
    result = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    result["command"] = rehearsing.command("benchmarks.placement", argv)
    result["host"] = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
    parts: dict[str, Callable[[], Any]] = {
        "gaps": lambda: gaps(asked.instances),
        "scale": lambda: scale(sizes),
        "paper": lambda: paper(asked.models),
    }
    for name in asked.only.split(","):
        result[name] = parts[name]()
        rehearsing.write_result(asked.out, result)
    placement_plot.plot(result, asked.out.with_suffix(".png"))


def rehearse(folder: Path) -> None:
    """All parts, of few instances, a cluster of ten GPUs and four models, and their plot."""
    out = folder / "placement.json"
    main(["--out", str(out), "--instances", "4", "--sizes", "10", "--models", "4"])
    rehearsing.check(out, "gaps", "scale", "paper")
    assert out.with_suffix(".png").stat().st_size > 1000


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
