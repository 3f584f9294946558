"""Estimates of bursts against the simulator, that the product ships: what a profile of its engine
foretells."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from controlplane.simulation.run import run
from controlplane.simulation.world import room_for_ended
from profiler.measurements import Point, Setting, Timing
from profiler.physical.calibrating import calibrate
from profiler.physical.calibration import Cut
from profiler.physical.pipeline import latency
from profiler.types import Workload
from testkit.known_models import LLAMA_7B
from testkit.simulation import worlds
from testkit.simulation.stepwise import Asked, Machine

LAYERS, STEP = 32, 2048
# About as a 7B on an H200: a step of 2,048 tokens takes 50 ms, one that decodes 64 rows 7.
ENGINE = Machine(
    base_s=4.5e-3,
    each_s=2e-5,
    token_s=2.2e-5,
    cached_s=1e-8,
    budget=STEP,
    most_rows=128,
    kv_tokens=1_000_000,
)
Floats = npt.NDArray[np.float64]


def burst(batch: int, length: int, output: int) -> tuple[Floats, Floats]:
    """When each of the requests had its first token, and its last."""
    world = worlds.new(ENGINE, [Asked(0.0, length, output) for _ in range(batch)])
    run(world, worlds.rules(), math.inf, room_for_ended(world))
    return np.array(world.outcomes.first_s), np.array(world.outcomes.end_s)


def timing(batch: int, length: int) -> Timing:
    setting = Setting((LAYERS,), batched_tokens=STEP)
    output = 32 + setting.prefill_steps(batch, length) - 1
    first_s, end_s = burst(batch, length, output)
    last = int(np.argmax(first_s))
    step_s = float(end_s[last] - first_s[last]) / (output - 1)
    means = float(first_s.mean()), float(first_s.max())
    return Timing(setting, Point(batch, length), output, *means, step_s, float(end_s.max()))


@pytest.mark.parametrize(
    ("batch", "length", "output"), [(1, 500, 20), (8, 128, 64), (32, 512, 64), (64, 1024, 64), (64, 1024, 8)]
)
def test_clients_of_a_burst_see_what_is_estimated(batch: int, length: int, output: int) -> None:
    points = [(b, n) for b in (1, 2, 4, 8, 16, 32, 64, 128) for n in (128, 1024)]
    found = calibrate(LLAMA_7B, [timing(*point) for point in points])
    guess = latency(found, Cut(1), (LAYERS,), Workload(batch, length, output))
    first_s, end_s = burst(batch, length, output)
    assert guess.ttft_s == pytest.approx(first_s.mean(), rel=0.08)
    assert guess.tpot_s == pytest.approx(((end_s - first_s) / (output - 1)).mean(), rel=0.08)
    if batch * length > 8 * STEP and output > 50:
        assert guess.tpot_s > 1.5 * guess.step_s  # which is what used to be shown
