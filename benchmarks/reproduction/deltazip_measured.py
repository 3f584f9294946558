"""How near the simulation of DeltaZip's comparison is: the cases that were measured on H200s, simulated.

`benchmarks.serving` served 32 full fine-tunes of a Llama-2-7B as deltas and as whole models, on an H200 each
(`benchmarks/results/serving.json`). The same requests go through the simulator here, with that run's slots,
KV cache and rows. Who has no answer when a case is given up counts with the time until then, as there.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import rehearsing
from benchmarks.reproduction.deltazip_testbeds import System, groups_of, h200, variants_of
from benchmarks.reproduction.replaying import replayed, requests_of
from benchmarks.reproduction.sizes import Size
from benchmarks.serving.workload import Request
from controlplane.simulation.world import DONE, World

# What that run was told (benchmarks.serving.settings).
SECONDS, DRAIN_S, MAX_ROWS, KV_BYTES = 15.0, 10.0, 64, 24 * 2**30
SYSTEMS = {"baseline": System("whole models", True, 7, False), "ours": System("deltas", False, 28, False)}
CASES = ("azure@0.5", "azure@1.0", "zipf@1", "uniform@1", "zipf@4", "uniform@4", "zipf@12", "uniform@12")
MEASURED = rehearsing.RESULTS / "serving.json"


def held_against_measurements(data: Path, size: Size) -> list[dict[str, Any]]:
    measured = {
        (row["engine"], row["case"]): row
        for row in json.loads(MEASURED.read_text())["rows"]
        if "requests" in row and row["limit"] == SYSTEMS[row["engine"]].slots
    }
    rows = []
    for case in CASES[: size.models]:
        asked = requests_of(data, case, SECONDS)
        for engine, system in SYSTEMS.items():
            found = _simulated(asked, system)
            compared = {
                "simulated": found,
                "measured": {name: measured[engine, case][name] for name in found},
            }
            rows.append({"case": case, "engine": engine, "requests": len(asked)} | compared)
            print(*rows[-1].values(), flush=True)
    return rows


def _simulated(asked: list[Request], system: System) -> dict[str, float]:
    testbed = h200()
    groups = groups_of(testbed, system).model_copy(
        update={"kv_tokens": int(KV_BYTES / testbed.cached_bytes), "max_rows": MAX_ROWS}
    )
    scenario = {
        "cluster": {"groups": [groups]},
        "gateway": {"max_ongoing": 10_000, "refuse": False},
        "variants": [variants_of(testbed, system)],
        "policies": ["most-idle"],
        "horizon_s": 1e6,
    }
    return _figures(replayed(asked, scenario))


def _figures(world: World) -> dict[str, float]:
    arrival_s, outcomes = world.asked.arrival_s, world.outcomes
    until_s = float(arrival_s[-1]) + DRAIN_S
    ended_s = np.where(outcomes.state == DONE, outcomes.end_s, math.inf)
    e2e_s = np.minimum(ended_s, until_s) - arrival_s
    ttft_s = np.minimum(outcomes.first_s, until_s) - arrival_s
    return {
        "e2e_mean_s": round(float(e2e_s.mean()), 4),
        "ttft_mean_s": round(float(ttft_s.mean()), 4),
        "unfinished": int((ended_s > until_s).sum()),
    }
