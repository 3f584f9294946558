"""The requests per second that the simulator handles on one core: 60 engines, 40,000 adapters, a policy.

CPU seconds of the simulation itself, without drawing the requests before and summing up after, which are told
apart. Machine code is compiled before. `--rate` is requests a second of virtual time; the cluster keeps its
promises up to about 600, and above about 900 requests wait in the gateway's line, which is not compiled.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import rehearsing
from controlplane.simulation.experiment import Case, Experiment
from controlplane.simulation.reading import form_of
from controlplane.simulation.world import DONE

# CaraServe's large experiment: A10s with Llama-2-7B, a kernel that does not pad (0.6 ms for 256 units of
# rank, compared with 33.5 ms), 0.5 MiB of KV cache a token, PCIe 4. Popularity and lengths are synthetic.
SCENARIO: dict[str, Any] = {
    "name": "60 servers, 40,000 adapters",
    "cluster": {
        "groups": [
            {
                "count": 60,
                "maxRows": 128,
                "kvTokens": 14_000,
                "slots": 32,
                "loadGbPerS": 20,
                "fetchGbPerS": 3.1,
                "steps": {"baseMs": 33.5, "promptBaseMs": 0, "promptTokenMs": 0.18, "rankUs": 2.34},
            }
        ]
    },
    "gateway": {"maxOngoing": 128},
    "variants": [{"kind": "lora", "count": 40_000, "ranks": [8, 16, 32, 64, 128], "mibPerRank": 1.5625}],
    "popularity": {"kind": "zipf", "exponent": 1.0},
    "traffic": {
        "ratePerS": 1,
        "promptTokens": {"kind": "lognormal", "mean": 77, "cv": 0.66, "least": 2, "most": 512},
        "outputTokens": {"kind": "lognormal", "mean": 125, "cv": 0.79, "least": 2, "most": 512},
    },
    "classes": [{"ttftMs": 1000, "tpotMs": 50}],
    "horizonS": 120,
}


def measure(scenario: dict[str, Any], policy: str, rate: float, repeats: int) -> dict[str, Any]:
    """The quickest of some runs: others may use the machine."""
    experiment = Experiment(form_of(scenario), Path())
    case = Case(policy, rate, 0, experiment.counts)
    times = []
    for _ in range(repeats):
        began = time.process_time()
        prepared = experiment.prepare(case)
        ready = time.process_time()
        prepared.run(math.inf)
        times.append((time.process_time() - ready, ready - began))
    run_s, prepare_s = min(times)
    world = prepared.world
    return {
        "policy": policy,
        "rate_per_s": rate,
        "requests": len(world.asked),
        "run_cpu_s": run_s,
        "prepare_cpu_s": prepare_s,
        "requests_per_cpu_s": len(world.asked) / run_s,
        "engine_steps": int(world.engines.ticks.sum()),
        "longest_line": int(world.gateway.longest[0]),
        "answered": int((world.outcomes.state == DONE).sum()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=rehearsing.RESULTS / "simulation.json")
    parser.add_argument("--policy", nargs="+", default=["least-harm"])
    parser.add_argument("--rate", nargs="+", type=float, default=[100.0, 300.0, 600.0, 1200.0])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    measure(SCENARIO | {"horizonS": 1}, options.policy[0], 100.0, 1)  # compiles
    results = []
    for policy in options.policy:
        for rate in options.rate:
            results.append(measure(SCENARIO, policy, rate, options.repeats))
            print(results[-1], flush=True)
    record = {
        "command": " ".join(["python -m benchmarks.simulation", *sys.argv[1:]]),
        "scenario": SCENARIO,
        "machine": f"{platform.machine()}, python {platform.python_version()}, one core, shared with others",
        "results": results,
    }
    rehearsing.write_result(options.out, record)
    return 0


def rehearse(folder: Path) -> None:
    small = SCENARIO | {"horizonS": 2, "variants": [{**SCENARIO["variants"][0], "count": 50}]}
    result = measure(small, "least-harm", 50.0, 1)
    rehearsing.write_result(folder / "simulation.json", {"scenario": small, "results": [result]})
    found = rehearsing.check(folder / "simulation.json", "results")
    assert found["results"][0]["answered"] == found["results"][0]["requests"] > 0


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
