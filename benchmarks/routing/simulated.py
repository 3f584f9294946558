"""The simulator, as these benchmarks use it: one run of a policy, and what came of the measured requests."""

from __future__ import annotations

import dataclasses
import functools
import math
import time

import numpy as np

from benchmarks.routing import scenarios
from benchmarks.routing.scenarios import Scenario
from controlplane.baselines.routing.choose import POLICIES
from controlplane.routing.snapshot import ORDER, ORDERS, Snapshot, new_snapshot
from controlplane.routing.state import new_state
from controlplane.simulation.run import run
from controlplane.simulation.world import ROW, Rules, World, new_world
from profiler.compiled import Records, records

TICK_S = 5.0
MAX_ONGOING = 256
LONGEST_WAIT_S = 30.0
OVERTIME_S = 15.0  # after the last arrival; who has no answer by then has missed its promises


@dataclasses.dataclass(frozen=True)
class Result:
    """Figures of the measured requests: the share whose promises of TTFT and TPOT were kept; means and a
    percentile of time per token (of requests that ended); the share sent where their variant was in no
    slot."""

    attainment: float
    tpot_mean_s: float
    tpot_p99_s: float
    ttft_p99_s: float
    late_ttft: float
    late_tpot: float
    cold: float
    requests: int
    run_s: float

    def as_row(self) -> dict[str, float | None]:
        """For JSON: what is infinite, or no number, is null."""
        row = dataclasses.asdict(self)
        return {
            name: round(value, 5) if -math.inf < value < math.inf else None for name, value in row.items()
        }


@functools.lru_cache(maxsize=4)
def _variants(scenario: Scenario, seed: int) -> Records:
    return scenarios.variant_records(scenario, np.random.default_rng((seed, 1)))


def simulate(scenario: Scenario, policy: str, rate: float, seed: int, all_looked_at: bool = False) -> Result:
    """Every policy gets the same requests for the same seed and rate. `all_looked_at`: of however many groups
    there are."""
    world, rules = begun(scenario, policy, rate, seed, all_looked_at)
    ended = records(ROW, scenario.machine.max_rows)
    began = time.process_time()
    run(world, rules, scenario.warm_s + scenario.measured_s + OVERTIME_S, ended)
    return result(scenario, world, time.process_time() - began)


def begun(
    scenario: Scenario, policy: str, rate: float, seed: int, all_looked_at: bool = False
) -> tuple[World, Rules]:
    """Nothing has happened yet."""
    variants = _variants(scenario, seed)
    asked = scenarios.requests(scenario, variants, rate, np.random.default_rng((seed, 2)))
    truth, seen = (_snapshot(scenario, variants) for _ in range(2))
    if all_looked_at:
        seen = without_orders(seen)
    world = new_world(asked, truth, seen, new_state(seed + 1), MAX_ONGOING)
    slots = scenario.machine.slots
    return world, Rules(POLICIES.index(policy), seed, 1, MAX_ONGOING, TICK_S, slots, LONGEST_WAIT_S)


def without_orders(snapshot: Snapshot) -> Snapshot:
    """The same, of which a policy looks at all groups."""
    return snapshot._replace(orders=records(ORDER, (ORDERS, 0)))


def _snapshot(scenario: Scenario, variants: Records) -> Snapshot:
    made = new_snapshot(scenario.groups, len(variants), scenarios.step_models(scenario.machine))
    made.variants[0] = variants
    made.held.where = scenarios.where_at_first(scenario, variants)
    return made


def result(scenario: Scenario, world: World, run_s: float) -> Result:
    asked, outcomes = world.asked, world.outcomes
    measured = asked.arrival_s >= scenario.warm_s
    asked, outcomes = asked[measured], outcomes[measured]
    done = outcomes.end_s > 0
    ttft_s = np.where(outcomes.first_s > 0, outcomes.first_s - asked.arrival_s, np.inf)
    tpot_s = np.where(done, (outcomes.end_s - outcomes.first_s) / np.maximum(1, asked.output - 1), np.inf)
    in_time, in_pace = ttft_s <= asked.ttft_s, tpot_s <= asked.tpot_s
    return Result(
        float((in_time & in_pace).mean()),
        float(tpot_s[done].mean()) if done.any() else np.inf,
        float(np.quantile(tpot_s, 0.99, method="higher")),
        float(np.quantile(ttft_s, 0.99, method="higher")),
        float(1 - in_time.mean()),
        float(1 - in_pace.mean()),
        float(outcomes.cold.mean()),
        len(asked),
        run_s,
    )
