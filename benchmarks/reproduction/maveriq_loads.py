"""MaverIQ's figure 8: which GPUs a newcomer gets, while load rises and falls.

Every three minutes of half an hour one more LLM is deployed, and the rate of requests changes. A GPU's load
is the share of the last two minutes in which it was busy, as simulated. Compared: the paper's three
selections and our policy, for the intent of least cost (the paper's default). Which ten LLMs the paper
deploys, and its rates, are not in its text: these are the four that fit one A6000, in turn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.placement_instances import model
from benchmarks.reproduction import serving
from benchmarks.reproduction.maveriq import CONCURRENCY, CONTEXT
from benchmarks.reproduction.site import paper_site
from benchmarks.reproduction.sizes import Size
from benchmarks.reproduction.step_models import of_placement
from benchmarks.reproduction.traffic import LONGEST_PROMPT, Traffic, fluctuating
from placement.solver.cluster import LOAD_WINDOW, Cluster, with_gpus
from placement.solver.layout import after
from placement.solver.policies.base import Policy
from placement.solver.policies.joint import Joint
from placement.solver.policies.maveriq import Maveriq, Selection
from placement.solver.request import Request
from placement.types import Intent

PERIOD_S = 180.0
# Requests a second, all models together. The text tells that load is high before the third deployment, and
# low before the fourth, and the sixth to eighth.
RATES = (0.5, 3.0, 0.3, 2.0, 0.3, 0.3, 0.3, 2.0, 3.0, 1.0)
OUTPUT_TOKENS = 128
NAMES = ("llama-2-13b", "llama-2-7b", "gpt-j-6b", "falcon-7b")
POLICIES: tuple[Policy, ...] = (Joint(), *(Maveriq(selection) for selection in Selection))


def figure_8(_data: Path, size: Size) -> list[dict[str, Any]]:
    count = min(len(RATES), size.models)
    rows = []
    for seed in range(size.seeds):
        traffic = fluctuating(RATES[:count], PERIOD_S, OUTPUT_TOKENS, seed)
        for policy in POLICIES:
            row = {"policy": policy.name, "seed": seed} | _run(policy, traffic, count)
            print(row["policy"], seed, row["gpus_used"], row["latency_s"], row["gpu_hours"], flush=True)
            rows.append(row)
    return rows


def _run(policy: Policy, traffic: Traffic, count: int) -> dict[str, Any]:
    site = paper_site("pcie")
    cluster, seen = site.idle, _Loads(np.zeros(site.idle.gpu_count), 0.0)
    server = serving.Server(site, traffic, count, CONCURRENCY)
    used: set[int] = set()
    periods, gpu_s = [], 0.0
    for number in range(count):
        start_s = number * PERIOD_S
        loads = seen.until(server, start_s)
        request = _request(number)
        found = policy.find(_with_loads(cluster, loads), request, site.estimator_for)
        if found is None:
            raise ValueError(f"expected room for {request.name}")
        cluster = after(cluster, request, found)
        server.deploy(number, of_placement(request, found))
        used |= set(server.deployed[-1].gpus)
        gpu_s += len(used) * PERIOD_S
        gpus = sorted(server.deployed[-1].gpus)
        periods.append({"gpus_used": len(used), "gpus": gpus, "loads": [round(load, 2) for load in loads]})
        server.run(start_s + PERIOD_S - LOAD_WINDOW)  # where the next load's window begins
        seen = _Loads(server.busy_s(start_s + PERIOD_S - LOAD_WINDOW), start_s + PERIOD_S - LOAD_WINDOW)
    server.run(np.inf)
    nothing_alone = np.full(len(traffic.asked), np.inf)
    row = serving.measures(server, nothing_alone)
    kept = ("requests", "dropped", "latency_s", "gpus_used", "shapes")
    return {name: row[name] for name in kept} | {"gpu_hours": round(gpu_s / 3600, 3), "periods": periods}


@dataclass(frozen=True)
class _Loads:
    """Busy seconds of each GPU when the window began."""

    busy_s: Any
    at_s: float

    def until(self, server: serving.Server, now_s: float) -> list[float]:
        server.run(now_s)
        since = (server.busy_s(now_s) - self.busy_s) / max(now_s - self.at_s, 1e-9)
        return [float(load) for load in np.clip(since, 0.0, 1.0)]


def _with_loads(cluster: Cluster, loads: list[float]) -> Cluster:
    (node,) = cluster.nodes
    return with_gpus(
        cluster, {(node.name, gpu.index): replace(gpu, load=loads[gpu.index]) for gpu in node.gpus}
    )


def _request(number: int) -> Request:
    """Nobody knows its rate beforehand: load is what was seen."""
    name = NAMES[number % len(NAMES)]
    return Request(
        name=f"{name}-{number + 1}",
        model=model(name),
        intent=Intent.MIN_COST,
        input_tokens=LONGEST_PROMPT,
        output_tokens=OUTPUT_TOKENS,
        concurrency=CONCURRENCY,
        context=CONTEXT,
    )
