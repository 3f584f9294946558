"""What it costs to look at some of many groups: the same simulation with all of them looked at.

`python -m benchmarks.routing.candidates --out benchmarks/results/routing_candidates.json`

CaraServe's setting (`benchmarks/routing/caraserve.py`) with a thousand groups. For each rate both simulations
get the same requests. `attainment`: the share whose promises were kept. While the one with candidates runs,
requests drawn from all are put to both at the same snapshot: `cost_ratio` is what the group that was picked
would cost over what the cheapest of all would; `same` is how often both cost the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import rehearsing
from benchmarks.routing.caraserve import SCENARIOS
from benchmarks.routing.scenarios import Scenario
from benchmarks.routing.simulated import OVERTIME_S, begun, result, simulate, without_orders
from controlplane.routing.policies.choose import POLICIES, choose
from controlplane.routing.policies.least_harm import pool_of, predicted_s
from controlplane.routing.snapshot import REQUEST, promise_class
from controlplane.simulation.admitting import admit_all
from controlplane.simulation.run import run
from controlplane.simulation.world import ROW, World
from profiler.compiled import Records, records

OURS = POLICIES[0]
SECONDS = 0.5  # of virtual time between two looks
# Requests a second for each group: about what 60 groups carry at 99% (routing_caraserve.json), and more.
RATES = {"bgmv-promises": (8.7, 9.5), "bgmv": (7.7, 8.5), "mbgmv": (10.3, 11.5), "mixed": (15.8,)}


def looked_at(world: World, i: int, key: int, request: Records) -> tuple[float, float]:
    """What the picks of some and of all groups cost for the i-th request, were it to come now."""
    asked = world.asked[i]
    request.variant, request.prompt, request.output = asked.variant, asked.prompt, asked.expected
    request.ttft_s, request.tpot_s, request.key = asked.ttft_s, asked.tpot_s, key
    request.promise = promise_class(float(asked.tpot_s))
    wanted = pool_of(world.seen, request)
    costs = []
    for snapshot in (world.seen, without_orders(world.seen)):
        g = choose(POLICIES.index(OURS), snapshot, request, world.state)
        costs.append(float(predicted_s(snapshot, g, request, wanted)))
    return costs[0], costs[1]


def compared(scenario: Scenario, rate: float, seed: int, looks: int) -> dict[str, Any]:
    """`looks`: requests that are put to both at a time."""
    rng = np.random.default_rng((seed, 3))
    world, rules = begun(scenario, OURS, rate, seed)
    ended, admitting, request = (
        records(ROW, scenario.machine.max_rows),
        admit_all(world),
        records(REQUEST, 1)[0],
    )
    span_s, run_s = scenario.warm_s + scenario.measured_s, 0.0
    costs: list[tuple[float, float]] = []
    for until_s in [*np.arange(scenario.warm_s, span_s, SECONDS), span_s + OVERTIME_S]:
        began = time.process_time()
        run(world, rules, float(until_s), ended, admitting)
        run_s += time.process_time() - began
        if until_s < span_s and world.seen.groups.usable.any():
            for i in rng.integers(0, len(world.asked), looks):
                costs.append(looked_at(world, int(i), int(rng.integers(1, 1 << 62)), request))
    few = result(scenario, world, run_s)
    every = simulate(scenario, OURS, rate, seed, all_looked_at=True)
    some, best = np.array(costs).T
    ratio = some / best
    return {
        "scenario": scenario.name,
        "groups": scenario.groups,
        "rate": rate,
        "seed": seed,
        "looks": len(costs),
        "same": round(float((ratio <= 1 + 1e-9).mean()), 4),
        "cost_ratio": {
            "mean": round(float(ratio.mean()), 4),
            **{f"p{q}": round(float(np.quantile(ratio, q / 100)), 4) for q in (50, 90, 99)},
            "largest": round(float(ratio.max()), 4),
        },
        "candidates": few.as_row(),
        "all": every.as_row(),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--variants", type=int, default=10_000)
    parser.add_argument("--scenarios", default=",".join(RATES))
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--looks", type=int, default=50)
    asked = parser.parse_args(argv)
    rows = []
    for name in asked.scenarios.split(","):
        (scenario,) = (scenario for scenario in SCENARIOS if scenario.name == name)
        scenario = dataclasses.replace(
            scenario,
            groups=asked.groups,
            variants=asked.variants,
            warm_s=asked.seconds,
            measured_s=asked.seconds / 2,
        )
        for rate in RATES[name]:
            for seed in range(asked.seeds):
                rows.append(compared(scenario, rate * asked.groups, seed, asked.looks))
                print(rows[-1], flush=True)
    host = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
    command = f"python -m benchmarks.routing.candidates --out benchmarks/results/{asked.out.name}"
    rehearsing.write_result(asked.out, {"command": command, "host": host, "rows": rows})


def rehearse(folder: Path) -> None:
    """Seventy groups, a second."""
    out = folder / "candidates.json"
    few = ["--groups", "70", "--variants", "100", "--scenarios", "mbgmv", "--seconds", "1", "--looks", "2"]
    main(["--out", str(out), *few])
    rehearsing.check(out, "rows")


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
