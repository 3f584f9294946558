"""How close our policy comes to what the machines hold: variants in flight, and how often one is in several
groups.

`python -m benchmarks.routing.in_flight --out benchmarks/results/routing_in_flight.json`

Scenarios of `benchmarks/routing/caraserve.py` at a rate that is just carried. Every ten seconds: `variants`
with a request in flight anywhere; `places`, the same summed over groups, of which there are at least as many;
rows; and predicted TPOT, its mean and the slowest group's. Where `places` is hardly more than `variants`, and
all groups are near the promise or all slots are taken, another router could not do with less.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import rehearsing
from benchmarks.routing.caraserve import OURS, SCENARIOS
from benchmarks.routing.scenarios import Scenario
from benchmarks.routing.simulated import begun
from controlplane.simulation.admitting import admit_all
from controlplane.simulation.run import run
from controlplane.simulation.world import ROW, World
from profiler.compiled import records

RATES = {"mixed": 935.0, "deltas-1000": 1207.0}
EVERY_S = 10.0


def seen(world: World, at_s: float) -> dict[str, Any]:
    rows, groups = np.asarray(world.seen.held.rows), world.seen.groups
    asked = rows[1:] > 0  # [V, G], without the base
    return {
        "at_s": at_s,
        "rows": int(rows.sum()),
        "variants": int(asked.any(axis=1).sum()),
        "places": int(asked.sum()),
        "most_variants_of_a_group": int(asked.sum(axis=0).max()),
        "tpot_mean_s": round(float(groups.tpot_s.mean()), 5),
        "tpot_most_s": round(float(groups.tpot_s.max()), 5),
    }


def watched(scenario: Scenario, rate: float, seed: int) -> dict[str, Any]:
    world, rules = begun(scenario, OURS, rate, seed)
    ended, admitting, looks = records(ROW, scenario.machine.max_rows), admit_all(world), []
    for at_s in np.arange(EVERY_S, scenario.warm_s + scenario.measured_s, EVERY_S):
        run(world, rules, float(at_s), ended, admitting)
        if at_s >= scenario.warm_s - EVERY_S:
            looks.append(seen(world, float(at_s)))
    slots = scenario.groups * scenario.machine.slots
    promise = {"tpot_promised_s": scenario.tpot_s, "slots": slots}
    return {"scenario": scenario.name, "rate": rate, "seed": seed, **promise, "looks": looks}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args(argv)
    rows = [
        watched(scenario, RATES[scenario.name], seed)
        for scenario in SCENARIOS
        if scenario.name in RATES
        for seed in range(asked.seeds)
    ]
    command = f"python -m benchmarks.routing.in_flight --out benchmarks/results/{asked.out.name}"
    rehearsing.write_result(asked.out, {"command": command, "rows": rows})


def rehearse(folder: Path) -> None:
    small = Scenario("small", SCENARIOS[-1].machine, groups=3, variants=20, warm_s=10.0, measured_s=11.0)
    rehearsing.write_result(folder / "in_flight.json", {"rows": [watched(small, 20.0, 0)]})
    (row,) = rehearsing.check(folder / "in_flight.json", "rows")["rows"]
    assert all(0 < look["variants"] <= look["places"] <= look["rows"] for look in row["looks"])


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
