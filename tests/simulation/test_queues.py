"""Engines with one row are queues whose mean waits are known: M/D/1, M/G/1, D/D/1."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from controlplane.simulation.intervals import mean_of
from controlplane.simulation.run import run
from controlplane.simulation.world import room_for_ended
from testkit.simulation import worlds
from testkit.simulation.stepwise import Asked, Machine

MACHINE = Machine(base_s=0.02, each_s=0.0, token_s=0.0, cached_s=0.0, budget=8, most_rows=1, kv_tokens=10_000)
COUNT, SEEDS, WARM = 10_000, 12, 1_000


def mean_wait_s(rate: float, draw_output: Callable[[np.random.Generator], np.ndarray], seed: int) -> float:
    """The time until its first step begins."""
    rng = np.random.default_rng(seed)
    arrivals, outputs = np.cumsum(rng.exponential(1 / rate, COUNT)), draw_output(rng)
    requests = [Asked(float(at_s), 1, int(output)) for at_s, output in zip(arrivals, outputs, strict=True)]
    world = worlds.new(MACHINE, requests, max_ongoing=COUNT)
    run(world, worlds.rules(max_ongoing=COUNT), math.inf, room_for_ended(world))
    return float((world.outcomes.first_s - MACHINE.base_s - world.asked.arrival_s)[WARM:].mean())


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_fixed_lengths_wait_as_in_m_d_1(load: float) -> None:
    service_s = 5 * MACHINE.base_s  # the prompt's step, and four more
    waits = [mean_wait_s(load / service_s, lambda _: np.full(COUNT, 5), seed) for seed in range(SEEDS)]
    expected_s = load * service_s / (2 * (1 - load))
    assert_within(waits, expected_s)


def test_geometric_lengths_wait_as_in_the_pollaczek_khinchine_formula() -> None:
    mean, load = 8.0, 0.6
    rate = load / (mean * MACHINE.base_s)
    second_moment = MACHINE.base_s**2 * (2 - 1 / mean) * mean**2
    waits = [mean_wait_s(rate, lambda rng: rng.geometric(1 / mean, COUNT), seed) for seed in range(SEEDS)]
    assert_within(waits, rate * second_moment / (2 * (1 - load)))


def assert_within(waits: list[float], expected_s: float) -> None:
    """Within twice the interval, which is narrow enough to say something."""
    found = mean_of(waits)
    assert found["mean"] is not None
    assert found["low"] is not None
    half = found["mean"] - found["low"]
    assert half < 0.1 * expected_s
    assert abs(found["mean"] - expected_s) < 2 * half
