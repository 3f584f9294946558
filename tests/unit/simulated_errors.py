"""Median errors of both estimators on tables of simulated machines.

PYTHONPATH=.:tests/unit python tests/unit/simulated_errors.py
"""

from __future__ import annotations

from dataclasses import replace

import artifact_simulator as sim

from controlplane.baselines.estimators.evaluating import Report, evaluate
from controlplane.baselines.estimators.types import EstimatorName

BATCHES = (1, 8, 16, 32, 64)
MACHINES = {
    "8 x A6000": sim.A6000,
    "8 x A6000, PCIe only": sim.PCIE_ONLY,
    "8 x A6000, slower kernels beyond 4 rows": sim.SWITCHING,
    "8 x H100": sim.H100,
}
# Those whose shallow pipelines are unlike deep ones.
PIPELINES = {
    "stages of 0.7 ms at least": sim.SLOW_HOST,
    "the same, by family 0.4 to 1.6 ms": sim.UNLIKE_HOSTS,
    "first stages of 2 ms at least": sim.SLOW_FIRST_STAGE,
    "stages that wait for the longest by half": sim.WAITING,
    "hops of 1 ms": sim.SLOW_HOPS,
}


def main() -> None:
    print(
        "| machine | noise | prompt | fingerprints | estimator | "
        + " | ".join(f"B={b}" for b in BATCHES)
        + " |"
    )
    print("|" + " --- |" * (5 + len(BATCHES)))
    for noise in (0.0, 0.005, 0.02):
        rows("8 x A6000", sim.Bench(sim.A6000, noise, 923, seed=1), few=False)
        rows("8 x A6000", sim.Bench(sim.A6000, noise, 10, seed=1), few=True)
    rows("8 x A6000", sim.Bench(sim.A6000, 0.005, 923, seed=1), few=True)
    for name, machine in list(MACHINES.items())[1:]:
        rows(name, sim.Bench(machine, 0.005, 923, seed=1), few=False)
        rows(name, sim.Bench(machine, 0.005, 10, seed=1), few=True)
    for name, machine in PIPELINES.items():
        rows(name, sim.Bench(machine, 0.005, 128, seed=1), few=False)


def rows(name: str, bench: sim.Bench, few: bool) -> None:
    batches = BATCHES if few else (1,)
    fingerprints = sim.table(bench.measure(sim.fingerprints(few, (1, 2) if few else (1,))))
    truth = sim.table(replace(bench, seed=2).measure(sim.full_models(bench, batches)))
    what = f"| {name} | {bench.noise:.1%} | {bench.prompt_tokens} | {'3 plans' if few else 'all plans'}"
    for estimator in EstimatorName:
        print(f"{what} | {estimator} | {cells(evaluate(fingerprints, truth, estimator))} |", flush=True)


def cells(report: Report) -> str:
    found = {group.value: group for group in report.groups if group.by == "batch"}
    return " | ".join(_cell(found[str(b)]) if str(b) in found else "" for b in BATCHES)


def _cell(group: object) -> str:
    latency, memory = group.latency, group.memory  # type: ignore[attr-defined]
    return f"{100 * latency.median:.1f} / {100 * memory.median:.1f}"


if __name__ == "__main__":
    main()
