"""A deployment of several models on one server plays its requests; and what came of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.reproduction.sharing import Devices, new_devices, play, settle
from benchmarks.reproduction.site import Site
from benchmarks.reproduction.step_models import Deployed, steps_of
from benchmarks.reproduction.traffic import Traffic
from controlplane.routing.snapshot import Snapshot, new_snapshot
from controlplane.routing.state import new_state
from controlplane.simulation.world import DONE, ROW, Rules, World, new_world
from placement.solver.layout import Layout, plan_of
from placement.solver.plan import Shape
from placement.solver.request import Request
from placement.solver.shapes import shapes
from placement.solver.view import view_of
from profiler.compiled import records
from profiler.plans import even_stages
from profiler.step_time.records import STEP_MODEL

GIB = 2**30
LOOK_AHEAD, PATIENCE_S = 1, 30.0
SLO_FACTORS = (2.5, 5.0, 7.5)  # of the latency alone, uncompressed, on the fewest GPUs (section 8.3)


class Server:
    """Models are deployed one after the other; requests come meanwhile."""

    def __init__(self, site: Site, traffic: Traffic, engines: int, rows: int) -> None:
        """Room for so many `engines`, of at most `rows` requests at once."""
        self.site, self.traffic = site, traffic
        self.deployed: list[Deployed] = []
        self.world = _world(traffic, engines, rows)
        self.devices: Devices = new_devices(engines, site.idle.gpu_count, traffic.models)
        self._rules = Rules(0, 0, LOOK_AHEAD, len(traffic.asked) + 1, 5.0, 0, PATIENCE_S)
        self._ended = records(ROW, rows)

    def deploy(self, model: int, deployed: Deployed) -> None:
        engine, steps = len(self.deployed), steps_of(self.site, deployed)
        self.world.truth.models[engine] = steps.model[0]
        self.devices.occupancy[engine] = steps.occupancy
        self.devices.on[engine, list(deployed.gpus)] = 1
        self.devices.serves[engine] = model
        self.deployed.append(deployed)

    def run(self, until_s: float) -> None:
        play(self.world, self._rules, self.devices, until_s, self._ended)

    def busy_s(self, now_s: float) -> npt.NDArray[np.float64]:
        """[D], since the beginning; nothing has happened since `now_s`."""
        for d in range(self.site.idle.gpu_count):
            settle(self.devices, d, now_s)
        return np.array(self.devices.busy_s, np.float64)


def _world(traffic: Traffic, engines: int, rows: int) -> World:
    models = records(STEP_MODEL, engines)
    models.max_rows = rows
    truth, seen = (_snapshot(models, engines) for _ in range(2))
    return new_world(traffic.asked, truth, seen, new_state(1, 1), len(traffic.asked) + 1)


def _snapshot(models: Any, engines: int) -> Snapshot:
    made = new_snapshot(engines, 1, models)
    made.groups.model = np.arange(engines)
    return made


def played(
    site: Site, deployed: Sequence[tuple[int, Deployed]], traffic: Traffic, alone_s: npt.NDArray[np.float64]
) -> dict[str, Any]:
    """All are there before the first request; the last answer ends it. `alone_s` [N]: `alone`."""
    rows = max(one.request.concurrency for _, one in deployed)
    server = Server(site, traffic, len(deployed), rows)
    for model, one in deployed:
        server.deploy(model, one)
    server.run(traffic.until_s)
    busy = server.busy_s(traffic.until_s) / traffic.until_s
    server.run(np.inf)
    return measures(server, alone_s) | {"gpu_busy": round(float(busy.mean()), 4)}


def measures(server: Server, alone_s: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Seconds from arrival to the last token, of those that were answered; who found no model is counted as
    `dropped`, and keeps no SLO. Throughput counts answers before the trace ends. User cost, memory and GPU
    hours are those of each request, by its model's copy."""
    traffic, outcomes = server.traffic, server.world.outcomes
    done = outcomes.state == DONE
    latency_s = np.where(done, outcomes.end_s - traffic.asked.arrival_s, np.inf)
    in_time = done & (outcomes.end_s <= traffic.until_s)
    copy = np.maximum(0, outcomes.group)
    memory = np.array([one.memory_bytes(server.site) / GIB for one in server.deployed])
    gpus = np.array([len(one.gpus) for one in server.deployed])
    used = len({gpu for one in server.deployed for gpu in one.gpus})
    taken = latency_s[done]
    return {
        "requests": len(done),
        "dropped": int((~done).sum()),
        "latency_s": spread(taken),
        "tokens_per_s": round(float(traffic.asked.output[in_time].sum()) / traffic.until_s, 2),
        "tokens_per_s_and_gpu": round(
            float(traffic.asked.output[in_time].sum()) / traffic.until_s / max(1, used), 2
        ),
        "slo_kept": {
            str(factor): round(float((latency_s <= factor * alone_s).mean()), 4) for factor in SLO_FACTORS
        },
        "user_cost_gib_s": spread(memory[copy][done] * taken),
        "memory_gib": spread(memory[copy][done]),
        "gpu_s": spread(gpus[copy][done] * taken),
        "gpus_used": used,
        "memory_of_all_gib": round(float(memory.sum()), 1),
        "shapes": [shape_of(one) for one in server.deployed],
    }


def shape_of(one: Deployed) -> str:
    shape = one.layout.shape
    return f"{one.request.name} {shape.compression.name} TP{shape.tp} PP{shape.pp}"


def spread(values: npt.NDArray[np.float64]) -> dict[str, float | None]:
    if not len(values):
        return dict.fromkeys(("mean", "p50", "p95"))
    found = (values.mean(), *np.percentile(values, (50, 95)))
    return {name: round(float(value), 4) for name, value in zip(("mean", "p50", "p95"), found, strict=True)}


def alone(site: Site, requests: Sequence[Request], traffic: Traffic) -> npt.NDArray[np.float64]:
    """[N]: what each request would take alone, uncompressed, on as few GPUs as hold its model."""
    ttft_s, tpot_s = np.array([_alone(site, request) for request in requests]).T
    taken = ttft_s[traffic.models] + tpot_s[traffic.models] * traffic.asked.output
    return np.asarray(taken, np.float64)


def _alone(site: Site, request: Request) -> tuple[float, float]:
    request = dataclasses.replace(request, rate_per_s=0.0)
    estimator, idle = site.estimator(request), site.idle
    room = idle.nodes[0].gpus[0].total_bytes
    for shape in shapes(request, idle.gpu_count):
        layout = _first_gpus(shape, request.model.layers)
        figures = estimator(plan_of(view_of(idle, request), layout))
        if shape.compression == request.model.compressions[0] and max(figures.memory_bytes) <= room:
            return figures.ttft_s, figures.tpot_s
    raise ValueError(f"expected a shape of {request.name} that fits an idle server")


def _first_gpus(shape: Shape, layers: int) -> Layout:
    groups = tuple(tuple(range(n * shape.tp, (n + 1) * shape.tp)) for n in range(shape.pp))
    return Layout(shape, groups, even_stages(layers, shape.pp))
