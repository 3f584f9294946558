"""Several gateways with views that are late: do they herd?

`python -m benchmarks.routing.herding --out benchmarks/results/routing_herding.json`

Each gateway knows its own requests at once, and those of the others from what workers push every 50 ms.
Servers are simple: a request stays for its output times a fixed time per token, so that only the choices
differ. Herding would show as groups that are far busier than the mean. `blind`: nothing is pushed, a gateway
knows its own requests only.
"""

from __future__ import annotations

import argparse
import heapq
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import rehearsing
from benchmarks.routing import scenarios
from benchmarks.routing.scenarios import MBGMV, Scenario
from controlplane.routing import bookkeeping
from controlplane.routing.policies.choose import POLICIES, choose
from controlplane.routing.snapshot import REQUEST, new_snapshot, promise_class
from controlplane.routing.state import new_state
from profiler.compiled import Records, records

PUSH_S = 0.05
TOKEN_S = 40e-3
SAMPLE_S = 0.25
VARIANTS = 2000


class Gateway:
    """A view of all groups: own requests, and rows like the first request's for those of others."""

    def __init__(self, scenario: Scenario, variants: Records, typical: Records, seed: int) -> None:
        self.snapshot = new_snapshot(scenario.groups, len(variants), scenarios.step_models(scenario.machine))
        self.snapshot.variants[0] = variants
        self.snapshot.held.where = scenarios.where_at_first(scenario, variants)
        self.state = new_state(len(variants), seed)
        self.own = np.zeros(scenario.groups, int)
        self.others = np.zeros(scenario.groups, int)
        self._typical = typical

    def send(self, policy: int, request: Records) -> int:
        g = int(choose(policy, self.snapshot, request, self.state))
        bookkeeping.sent(self.snapshot, g, request)
        bookkeeping.filled(self.snapshot, g, request)
        self.own[g] += 1
        return g

    def end(self, g: int, request: Records) -> None:
        bookkeeping.ended(self.snapshot, g, request, True)
        self.own[g] -= 1

    def hear(self, ongoing: Any) -> None:
        """What the workers have pushed: requests of all gateways, [G]."""
        change = np.maximum(0, ongoing - self.own) - self.others
        for g in np.flatnonzero(change):
            for _ in range(change[g]):
                bookkeeping.sent(self.snapshot, g, self._typical)
                bookkeeping.filled(self.snapshot, g, self._typical)
            for _ in range(-change[g]):
                bookkeeping.ended(self.snapshot, g, self._typical, True)
        self.others += change


def busiest_over_mean(
    policy: str, gateways: int, rate: float, span_s: float, seed: int, pushes: bool = True
) -> list[float]:
    """Sampled over the second half of the time."""
    rng = np.random.default_rng(seed)
    scenario = Scenario("herding", MBGMV, variants=VARIANTS, warm_s=0.0, measured_s=span_s)
    variants = scenarios.variant_records(scenario, rng)
    asked = scenarios.requests(scenario, variants, rate, rng)
    requests = _described(asked, rng)
    views = [Gateway(scenario, variants, requests[0], seed + n) for n in range(gateways)]
    of_gateway = rng.integers(0, gateways, len(asked))
    events: list[tuple[float, int, int, int]] = [(PUSH_S, -1, 0, 0)]
    ratios: list[float] = []
    ongoing, heard = np.zeros(scenario.groups, int), np.zeros(scenario.groups, int)
    sample_s = span_s / 2
    for i, arrival_s in enumerate(asked.arrival_s):
        while events and events[0][0] <= arrival_s:
            now_s, request, n, g = heapq.heappop(events)
            if request >= 0:
                views[n].end(g, requests[request])
                ongoing[g] -= 1
                continue
            if pushes:
                for view in views:
                    view.hear(heard)  # as it was when the push before this one was sent
            heard = ongoing.copy()
            heapq.heappush(events, (now_s + PUSH_S, -1, 0, 0))
        if arrival_s >= sample_s:
            sample_s += SAMPLE_S
            ratios.append(float(ongoing.max() / max(1e-9, ongoing.mean())))
        n = int(of_gateway[i])
        g = views[n].send(POLICIES.index(policy), requests[i])
        ongoing[g] += 1
        heapq.heappush(events, (arrival_s + float(asked.output[i]) * TOKEN_S, i, n, g))
    return ratios


def _described(asked: Records, rng: np.random.Generator) -> list[Any]:
    made = records(REQUEST, len(asked))
    made.variant, made.prompt, made.output = asked.variant, asked.prompt, asked.expected
    made.ttft_s, made.tpot_s = asked.ttft_s, asked.tpot_s
    made.promise = [promise_class(float(seconds)) for seconds in asked.tpot_s]
    made.key = rng.integers(1, 1 << 62, len(made))
    return [made[i] for i in range(len(made))]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--policies", default="least-harm,most-idle,two-choices,caraserve")
    parser.add_argument("--gateways", default="1,2,4")
    parser.add_argument("--rate", type=float, default=300.0)
    parser.add_argument("--seconds", type=float, default=24.0)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args(argv)
    rows = []
    for policy in asked.policies.split(","):
        for gateways in map(int, asked.gateways.split(",")):
            for pushes in (True, False) if gateways > 1 else (True,):
                ratios = [
                    ratio
                    for seed in range(asked.seeds)
                    for ratio in busiest_over_mean(policy, gateways, asked.rate, asked.seconds, seed, pushes)
                ]
                row = {
                    "policy": policy,
                    "gateways": gateways,
                    "pushes": pushes,
                    "busiest_over_mean": round(float(np.mean(ratios)), 3),
                    "p99": round(float(np.quantile(ratios, 0.99)), 3),
                    "samples": len(ratios),
                }
                rows.append(row)
                print(row, flush=True)
    host = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
    command = f"python -m benchmarks.routing.herding --out benchmarks/results/{asked.out.name}"
    record = {"command": command, "host": host, "rate": asked.rate, "seeds": asked.seeds, "rows": rows}
    rehearsing.write_result(asked.out, record)


def rehearse(folder: Path) -> None:
    """Two gateways for two seconds."""
    out = folder / "herding.json"
    few = ["--gateways", "2", "--rate", "50", "--seconds", "2", "--seeds", "1"]
    main(["--out", str(out), "--policies", "least-harm", *few])
    rehearsing.check(out, "rows")


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
