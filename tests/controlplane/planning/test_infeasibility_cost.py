"""The time of a refusal on large clusters: little more than a decision, though it consists of many."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from controlplane import errors
from controlplane.planning.placement_decision import decide
from controlplane.settings import Settings
from controlplane.state.records import Deployment, ExpectedLoad, Model, Phase, PlanConstraints
from placement.types import Device, Intent, Inventory, Slos
from profiler.types import DeviceRates, ModelSpec
from testkit.known_models import LLAMA_7B, llama

GIB = 1 << 30
SMOLLM2 = llama(30, 576, 9, 3, 1536, 49152, 2, tied=True)
LLAMA_70B = llama(80, 8192, 64, 8, 28672, 32000, 2, tied=False)
SETTINGS = Settings(home=Path("/nowhere"), max_model_len=1024, concurrency=8)
UNREACHABLE, UNBEARABLE = Slos(latency_s=1e-6), ExpectedLoad(1e6)
# Times the CPU time of a fixed piece of Python in the same run: a busy machine slows both.
MOST = 200.0  # a third of it on an idle core, where it is 6 s


def reference_s() -> float:
    """CPU seconds of a fixed piece of Python."""
    begun = time.process_time()
    sum(hash((number, number % 7)) % 3 for number in range(300_000))
    return time.process_time() - begun


def gpus(count: int, free_gib: tuple[float, float]) -> Inventory:
    """Nodes of 8, in part used and busy."""
    rng = random.Random(count)
    return Inventory(
        tuple(
            Device(
                f"n{number // 8:04}",
                number % 8,
                "h200",
                140 * GIB,
                int(rng.uniform(*free_gib) * GIB),
                DeviceRates(4e12, 5e14),
                "h200",
                "0.26",
                rng.random() * 0.9,
            )
            for number in range(count)
        )
    )


def refused(spec: ModelSpec, inventory: Inventory, **limits: object) -> tuple[list[str], float]:
    """The feasible relaxations, and the CPU time to find them in multiples of the reference's."""
    asked = Deployment("m", 1, "m", Phase.PENDING, Intent.MIN_COST, 128)
    asked = replace(asked, **limits)  # type: ignore[arg-type]
    model = Model("m", 1, Phase.READY, path="/m", spec=spec)
    before_s = reference_s()
    begun = time.process_time()
    with pytest.raises(errors.NoFeasiblePlan) as refusal:
        decide(model, asked, inventory, SETTINGS)
    took_s = time.process_time() - begun
    took = took_s / max(before_s, reference_s())
    return [one["constraint"] for one in refusal.value.details["relaxations"]], took


@pytest.mark.slow
@pytest.mark.parametrize("count", [64, 1000])
@pytest.mark.parametrize("spec", [SMOLLM2, LLAMA_7B, LLAMA_70B], ids=["smollm2", "7b", "70b"])
def test_a_refusal_takes_seconds_at_most(spec: ModelSpec, count: int) -> None:
    inventory = gpus(count, (20, 140))
    for limits, expected in (
        ({"slos": UNREACHABLE}, ["SLOs.e2e_ms"]),
        ({"load": UNBEARABLE}, ["load.ratePerS"]),
        ({"slos": UNREACHABLE, "load": UNBEARABLE}, ["SLOs.e2e_ms", "load.ratePerS"]),
        ({"slos": UNREACHABLE, "constraints": PlanConstraints(tensor_parallel=(1,))}, ["SLOs.e2e_ms"]),
    ):
        found, took = refused(spec, inventory, **limits)
        assert (found, took < MOST) == (expected, True), (limits, f"{took:.0f} times the reference")


@pytest.mark.slow
def test_a_pipeline_longer_than_usual_is_offered_within_seconds() -> None:
    """A plan needs more than the tried number of 1,000 fragments, each with room for a few layers next to the
    engine's 3.6 GiB."""
    found, took = refused(LLAMA_70B, gpus(1000, (4.4, 4.9)))
    assert (found, took < MOST) == (["parallelism"], True), f"{took:.0f} times the reference"
