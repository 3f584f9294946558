"""CaraServe's large experiment (section 7.5): how many requests a second each policy carries within their
promises.

`python -m benchmarks.routing.caraserve --out benchmarks/results/routing_caraserve.json`

60 servers on virtual time, 40,000 adapters of ranks 8 to 128 of one base. For each policy and seed the rate
is raised until less than 99% of the measured requests get their first token and their time per token within
the promises. Scenarios: padded kernels (bgmv) and unpadded ones (mbgmv) on CaraServe's A10s, each with steady
popularity and with one that drifts; H200s with deltas of 3 GB only, and with deltas, BOFT and LoRA mixed.
Popularity is synthetic (Zipf). `benchmarks/routing/scenarios.py` says where each figure is from. It goes on
where an earlier run with the same --out has stopped. `--jobs` processes share the work; they find the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeAlias

from scipy import stats

from benchmarks import rehearsing
from benchmarks.routing import plot
from benchmarks.routing.rates import largest_rate
from benchmarks.routing.scenarios import BGMV, H200, MBGMV, Mix, Scenario
from benchmarks.routing.simulated import simulate
from controlplane.baselines.routing.choose import POLICIES

OURS = POLICIES[0]
ATTAINMENT = 0.99
PRECISION = 0.03
DRIFT_S = 10.0
_DELTAS = Scenario("deltas", H200, mix=Mix(delta=1.0), tpot_s=30e-3, ttft_s=2.0)
SCENARIOS = (
    Scenario("bgmv", BGMV),
    Scenario("bgmv-drift", BGMV, drift_s=DRIFT_S),
    Scenario("mbgmv", MBGMV),
    Scenario("mbgmv-drift", MBGMV, drift_s=DRIFT_S),
    Scenario("bgmv-promises", BGMV, loose_share=0.5),
    dataclasses.replace(_DELTAS, name="mixed", mix=Mix(delta=0.3, boft=0.2)),
    dataclasses.replace(_DELTAS, name="deltas-1000", variants=1000),
)
FIRST_GUESS = 400.0
KEPT = ("attainment", "tpot_mean_s", "late_ttft", "late_tpot")  # of every rate that was tried


def searched(scenario: Scenario, policy: str, seed: int, guess: float) -> dict[str, Any]:
    """The largest rate, and what came of all that were tried."""
    tried: dict[float, dict[str, Any]] = {}

    def keeps(rate: float) -> bool:
        found = simulate(scenario, policy, rate, seed)
        row = found.as_row()
        tried[rate] = {"rate": round(rate, 2), **{name: row[name] for name in KEPT}}
        return found.attainment >= ATTAINMENT

    rate = largest_rate(keeps, guess, PRECISION)
    at = tried.get(rate, {"tpot_mean_s": None})
    return {
        "scenario": scenario.name,
        "policy": policy,
        "seed": seed,
        "rate": round(rate, 2),
        "tpot_mean_s": at["tpot_mean_s"],
        "tried": sorted(tried.values(), key=lambda row: row["rate"]),
    }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half of its 95% interval (Student's t)."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, float("inf")
    spread = statistics.stdev(values) / len(values) ** 0.5
    return mean, float(stats.t.ppf(0.975, len(values) - 1) * spread)


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each scenario: every policy's largest rate over the seeds, and ours over the best other one's, seed
    by seed."""
    made = []
    for name in dict.fromkeys(row["scenario"] for row in rows):
        rates: dict[str, dict[int, float]] = {}
        for row in rows:
            if row["scenario"] == name:
                rates.setdefault(row["policy"], {})[row["seed"]] = row["rate"]
        means = {policy: interval([*of_seed.values()]) for policy, of_seed in rates.items()}
        entry: dict[str, Any] = {
            "scenario": name,
            "seeds": {policy: len(of_seed) for policy, of_seed in rates.items()},
            "rates": {
                policy: {"mean": round(mean, 1), "half_of_95": _finite(half)}
                for policy, (mean, half) in means.items()
            },
        }
        others = {policy: mean for policy, (mean, _) in means.items() if policy != OURS}
        if OURS in rates and others:
            best = max(others, key=lambda policy: others[policy])
            both = sorted(set(rates[OURS]) & set(rates[best]))
            ratio, half = interval([rates[OURS][seed] / rates[best][seed] for seed in both])
            entry |= {"best_other": best, "ratio": round(ratio, 3), "ratio_half_of_95": _finite(half)}
        made.append(entry)
    return made


def _finite(number: float) -> float | None:
    return round(number, 3) if number < float("inf") else None


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scenarios", default=",".join(scenario.name for scenario in SCENARIOS))
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--groups", type=int, default=60)
    parser.add_argument("--variants", type=int, default=0, help="instead of the scenario's")
    parser.add_argument("--seconds", type=float, default=0.0, help="to measure, instead of the scenario's")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    asked = parser.parse_args(argv)
    result = json.loads(asked.out.read_text()) if asked.out.exists() else {"rows": []}
    known = {scenario.name: _changed(scenario, asked) for scenario in SCENARIOS}
    chains = [
        (known[name], policy, _of(result["rows"], name, policy), asked.seeds)
        for name in asked.scenarios.split(",")
        for policy in asked.policies.split(",")
    ]
    for rows in _done(chains, asked.jobs):
        result["rows"] += rows
        result["rows"].sort(key=lambda row: (row["seed"], [*known].index(row["scenario"]), row["policy"]))
        _write(asked.out, result)


Chain: TypeAlias = tuple[Scenario, str, list[dict[str, Any]], int]


def _of(rows: Sequence[dict[str, Any]], scenario: str, policy: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["scenario"] == scenario and row["policy"] == policy]


def _done(chains: Sequence[Chain], jobs: int) -> Iterator[list[dict[str, Any]]]:
    if jobs == 1:
        yield from map(_seeds, chains)
        return
    with ProcessPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(_seeds, chain) for chain in chains]):
            yield future.result()


def _seeds(chain: Chain) -> list[dict[str, Any]]:
    """The seeds that lack, one after the other: each begins to search where the one before ended."""
    scenario, policy, before, seeds = chain
    made: list[dict[str, Any]] = []
    for seed in range(seeds):
        if any(row["seed"] == seed for row in before):
            continue
        known = [*before, *made]
        guess = known[-1]["rate"] if known else FIRST_GUESS * scenario.groups / 60
        made.append(searched(scenario, policy, seed, guess or 1.0))
        print(seed, scenario.name, policy, made[-1]["rate"], flush=True)
    return made


def _changed(scenario: Scenario, asked: argparse.Namespace) -> Scenario:
    scenario = dataclasses.replace(scenario, groups=asked.groups)
    if asked.variants:
        scenario = dataclasses.replace(scenario, variants=asked.variants)
    if asked.seconds:
        scenario = dataclasses.replace(scenario, warm_s=asked.seconds, measured_s=asked.seconds)
    return scenario


def _write(out: Path, result: dict[str, Any]) -> None:
    result["command"] = f"python -m benchmarks.routing.caraserve --out benchmarks/results/{out.name}"
    result["host"] = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
    result["popularity"] = "synthetic: Zipf with exponent 1"
    result["summary"] = summary(result["rows"])
    rehearsing.write_result(out, result)
    plot.rates(result, out.with_suffix(".png"))


def rehearse(folder: Path) -> None:
    """Three servers, fifty adapters, five seconds, two policies, one seed."""
    out = folder / "caraserve.json"
    few = ["--groups", "3", "--variants", "50", "--seconds", "5", "--seeds", "1"]
    main(["--out", str(out), "--scenarios", "bgmv,mixed", "--policies", f"{OURS},most-idle", *few])
    rehearsing.check(out, "rows", "summary")
    assert out.with_suffix(".png").stat().st_size > 1000


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
