"""The cost of a decision: choose, sent and ended, as Python calls them and compiled, by the number of groups.

`python -m benchmarks.routing.decisions --out benchmarks/results/routing_decisions.json`

Every group has 1,000 requests for a hundred of a thousand variants. Called from Python, each of the three
calls also costs what numba takes to pass the records; compiled, one call makes many decisions, and only their
mean is known.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import rehearsing
from benchmarks.routing import scenarios
from benchmarks.routing.scenarios import H200, Mix, Scenario
from controlplane.baselines.routing.choose import POLICIES, choose
from controlplane.routing import bookkeeping
from controlplane.routing.snapshot import REQUEST, Snapshot, new_snapshot, promise_class
from controlplane.routing.state import RouterState, new_state
from profiler.compiled import Records, compiled, records

GROUPS = (10, 30, 60, 100, 300, 1000, 4000)
ROWS, ASKED_VARIANTS, VARIANTS = 1000, 100, 1000

_choose, _sent, _ended = choose, bookkeeping.sent, bookkeeping.ended


@compiled
def decide(policy: int, snapshot: Snapshot, requests: Records, state: RouterState) -> int:
    """A decision for each request, which ends at once. The sum of the groups, so that none is left out."""
    total = 0
    for i in range(len(requests)):
        g = _choose(policy, snapshot, requests[i], state)
        _sent(snapshot, g, requests[i])
        _ended(snapshot, g, requests[i], True)
        total += g
    return total


@compiled
def fill(snapshot: Snapshot, requests: Records, each: int, kinds: int) -> None:
    """`each` requests for every group, of `kinds` variants a group."""
    for g in range(len(snapshot.groups)):
        for i in range(each):
            request = requests[(g * 7919 + i % kinds) % len(requests)]
            _sent(snapshot, g, request)


def busy_snapshot(groups: int, rows: int) -> tuple[Snapshot, Records]:
    """And requests to be sent."""
    rng = np.random.default_rng(1)
    scenario = Scenario("decisions", H200, groups=groups, variants=VARIANTS - 1, mix=Mix(0.3, 0.2))
    variants = scenarios.variant_records(scenario, rng)
    snapshot = new_snapshot(groups, VARIANTS, scenarios.step_models(scenario.machine))
    snapshot.variants[0] = variants
    snapshot.held.where = rng.integers(0, 4, snapshot.held.shape)
    requests = records(REQUEST, 5000)
    requests.variant = rng.integers(1, VARIANTS, len(requests))
    requests.prompt, requests.output = rng.integers(10, 1000, len(requests)), scenarios.mean_output()
    requests.ttft_s, requests.tpot_s = 1.0, rng.choice([20e-3, 50e-3], len(requests))
    requests.promise = [promise_class(float(seconds)) for seconds in requests.tpot_s]
    requests.key = rng.integers(1, 1 << 62, len(requests))
    fill(snapshot, requests, rows, ASKED_VARIANTS)
    return snapshot, requests


def measured(policy: str, groups: int, rows: int, count: int) -> dict[str, Any]:
    snapshot, requests = busy_snapshot(groups, rows)
    state, number = new_state(1), POLICIES.index(policy)
    singles = [requests[i] for i in range(len(requests))]
    seconds, cpu = [], []
    for i in range(count + 10):
        request = singles[i % len(singles)]
        began, began_cpu = time.perf_counter(), time.thread_time_ns()
        g = choose(number, snapshot, request, state)
        bookkeeping.sent(snapshot, g, request)
        bookkeeping.ended(snapshot, g, request, True)
        cpu.append((time.thread_time_ns() - began_cpu) * 1e-9)
        seconds.append(time.perf_counter() - began)
    few = requests[: min(count, len(requests))]
    decide(number, snapshot, few[:1], state)
    began = time.process_time()
    decide(number, snapshot, few, state)
    compiled_s = (time.process_time() - began) / len(few)
    p50, p99 = np.quantile(seconds[10:], (0.5, 0.99)).tolist()
    cpu_p50, cpu_p99 = np.quantile(cpu[10:], (0.5, 0.99)).tolist()
    return {
        "policy": policy,
        "groups": groups,
        "rows": rows,
        "decisions": count,
        "p50_us": round(p50 * 1e6, 1),
        "p99_us": round(p99 * 1e6, 1),
        "cpu_p50_us": round(cpu_p50 * 1e6, 1),
        "cpu_p99_us": round(cpu_p99 * 1e6, 1),
        "compiled_mean_us": round(compiled_s * 1e6, 2),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = rehearsing.parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--groups", default=",".join(map(str, GROUPS)))
    parser.add_argument("--policies", default="least-harm,caraserve,most-idle,adapter-affinity")
    parser.add_argument("--decisions", type=int, default=3000)
    asked = parser.parse_args(argv)
    rows = []
    for policy in asked.policies.split(","):
        for groups in map(int, asked.groups.split(",")):
            rows.append(measured(policy, groups, ROWS, asked.decisions))
            print(rows[-1], flush=True)
    host = {
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
    }
    command = f"python -m benchmarks.routing.decisions --out benchmarks/results/{asked.out.name}"
    rehearsing.write_result(asked.out, {"command": command, "host": host, "rows": rows})


def rehearse(folder: Path) -> None:
    """Five groups, a few decisions."""
    out = folder / "decisions.json"
    main(["--out", str(out), "--groups", "5", "--policies", "least-harm", "--decisions", "20"])
    rehearsing.check(out, "rows")


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
