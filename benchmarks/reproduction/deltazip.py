"""DeltaZip's figures 11 to 13 and 19: 32 full fine-tunes as deltas, beside swapping whole models.

11 to 13: throughput, mean latency and TTFT, and the share of requests within a limit, by rate and popularity
(`azure`: the paper's own traces, again and again for five minutes, stretched to the rate; uniform; Zipf with
exponent 1.5). 19: with and without its preemption of requests that skipped the line. Lengths are as those of
its traces; what else is assumed `benchmarks.reproduction.deltazip_testbeds` says.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.reproduction.deltazip_testbeds import (
    System,
    Testbed,
    a800,
    groups_of,
    h200,
    systems,
    variants_of,
)
from benchmarks.reproduction.sizes import Size
from controlplane.simulation.experiment import Case, Experiment
from controlplane.simulation.forms import ScenarioForm
from controlplane.simulation.world import DONE, World

TRACES = {0.5: "deltazip-azure-ar0.5.jsonl", 1.0: "deltazip-azure-ar1.0.jsonl"}
POPULARITIES: dict[str, dict[str, Any]] = {
    "azure": {},
    "uniform": {"kind": "uniform"},
    "zipf-1.5": {"kind": "zipf", "exponent": 1.5},
}
PROMPT = {"kind": "lognormal", "mean": 20, "cv": 1.0, "most": 512}  # of both traces together: 20 and 133
OUTPUT = {"kind": "lognormal", "mean": 133, "cv": 1.0, "most": 512}
LIMITS_S = (0.25, 0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120)  # of figure 13
NEVER = 1 << 30  # tokens: who skipped the line is never so far from its end
NO_PATIENCE_S = 1e9
PAPERS_ENGINE: dict[str, Any] = {"longest_wait_s": NO_PATIENCE_S, "almost_done_tokens": 0}
FIGURE_19 = {
    "no preemption": {**PAPERS_ENGINE, "almost_done_tokens": NEVER},
    "preemption": PAPERS_ENGINE,
    "preemption, ours": {},
}
SLOTS_19 = 4


def figures_11_to_13(data: Path, size: Size) -> list[dict[str, Any]]:
    rows = []
    cases = itertools.product((a800(), h200()), POPULARITIES, size.rates, (True, False))
    for testbed, popularity, rate, from_disk in cases:
        for system in systems(testbed, from_disk):
            form = scenario(data, size, testbed, system, popularity, rate, PAPERS_ENGINE)
            rows += _of_seeds(form, data, rate, _labels(testbed, system, popularity, rate))
    return rows


def figure_19(data: Path, size: Size) -> list[dict[str, Any]]:
    """Few deltas at once, so that others have to wait."""
    rows = []
    for popularity, rate, from_disk in itertools.product(POPULARITIES, size.rates, (True, False)):
        system = System(f"deltas, {SLOTS_19} at once", False, SLOTS_19, from_disk)
        for name, engine in FIGURE_19.items():
            form = scenario(data, size, a800(), system, popularity, rate, engine)
            labels = _labels(a800(), system, popularity, rate) | {"line": name}
            rows += _of_seeds(form, data, rate, labels)
    return rows


def _labels(testbed: Testbed, system: System, popularity: str, rate: float) -> dict[str, Any]:
    source = "disk" if system.from_disk else "host"
    return {
        "testbed": testbed.name,
        "system": system.name,
        "slots": system.slots,
        "from": source,
        "popularity": popularity,
        "rate": rate,
    }


def scenario(
    data: Path,
    size: Size,
    testbed: Testbed,
    system: System,
    popularity: str,
    rate: float,
    engine: dict[str, Any],
) -> ScenarioForm:
    """Nobody is refused, and nothing waits in the gateway: the engine's line is the only one."""
    if popularity == "azure":
        trace = TRACES[0.5 if rate <= 0.5 else 1.0]
        traffic = {"arrivals": "trace", "file": str(data.resolve() / trace), "repeat": True}
    else:
        traffic = {"prompt_tokens": PROMPT, "output_tokens": OUTPUT}
    return ScenarioForm.model_validate(
        {
            "cluster": {"groups": [groups_of(testbed, system)]},
            "engine": engine,
            "gateway": {"max_ongoing": 10_000, "refuse": False},
            "variants": [variants_of(testbed, system)],
            "popularity": POPULARITIES[popularity],
            "traffic": {**traffic, "rate_per_s": rate},
            "policies": ["most-idle"],  # there is one group
            "seeds": size.seeds,
            "horizon_s": size.horizon_s,
        }
    )


def _of_seeds(form: ScenarioForm, data: Path, rate: float, labels: dict[str, Any]) -> list[dict[str, Any]]:
    """A trace is the same for every seed."""
    experiment = Experiment(form, data)
    seeds = 1 if labels["popularity"] == "azure" else form.seeds
    rows = []
    for seed in range(seeds):
        world, measured = experiment.watched(Case(form.policies[0], rate, seed, experiment.counts))
        within = {"within": _within(world)} if labels["popularity"] == "azure" else {}
        rows.append({**labels, "seed": seed, **_kept(measured), **within})
        print(*labels.values(), seed, rows[-1]["requestsPerS"], rows[-1]["e2eS"]["mean"], flush=True)
    return rows


def _kept(measured: dict[str, Any]) -> dict[str, Any]:
    counts = ("requests", "loads", "lineSkips", "preemptions")
    names = (*counts, "requestsPerS", "tokensPerS", "utilisation", "longestWaitS")
    spreads = {name: _rounded(measured[name]) for name in ("e2eS", "ttftS")}
    return _rounded({name: measured[name] for name in names}) | spreads


def _rounded(values: dict[str, float | None]) -> dict[str, Any]:
    return {name: None if value is None else round(value, 4) for name, value in values.items()}


def _within(world: World) -> dict[str, Sequence[float]]:
    """Shares of all requests whose whole answer, or first token, came within each of LIMITS_S."""
    done = world.outcomes.state == DONE
    e2e_s = np.where(done, world.outcomes.end_s - world.asked.arrival_s, np.inf)
    ttft_s = np.where(done, world.outcomes.first_s - world.asked.arrival_s, np.inf)
    return {"limits_s": LIMITS_S, "e2e": _shares(e2e_s), "ttft": _shares(ttft_s)}


def _shares(taken_s: npt.NDArray[np.float64]) -> list[float]:
    return [round(float((taken_s <= limit_s).mean()), 4) for limit_s in LIMITS_S]
