"""The same requests on virtual time: `controlplane.simulation` around a gateway with its router."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.simulator_reality.types import Asked, Facts, Timed
from controlplane.baselines.routing.choose import POLICIES
from controlplane.routing.snapshot import IN_HOST_MEMORY, Snapshot, new_snapshot
from controlplane.routing.state import new_state
from controlplane.simulation.run import run
from controlplane.simulation.world import ASKED, DONE, ROW, Rules, World, new_world
from profiler.compiled import Records, records

TICK_S, LONGEST_WAIT_S = 5.0, 10.0
LOAD_S = 1e-6  # next to nothing: what is measured is in slots already
LOOK_AHEAD = 1  # steps that vLLM has scheduled when a request comes


def simulate(
    facts: Facts, model: Records, variants: Records, asked: Sequence[Asked], seed: int = 0
) -> list[Timed]:
    """Variants are in the engines' host memory and take `LOAD_S` to a slot. Raises RuntimeError for a request
    that is not answered."""
    world = _world(facts, model, variants, asked, seed)
    rules = Rules(
        POLICIES.index(facts.policy), seed, LOOK_AHEAD, facts.max_ongoing, TICK_S, facts.slots, LONGEST_WAIT_S
    )
    run(world, rules, np.inf, records(ROW, facts.rows))
    return [_timed(world, i, model[0].path_s) for i in range(len(asked))]


def _world(facts: Facts, model: Records, variants: Records, asked: Sequence[Asked], seed: int) -> World:
    rows = records(ASKED, len(asked))
    rows.ttft_s = rows.tpot_s = np.inf
    for row, one in zip(rows, asked, strict=True):
        row.arrival_s, row.variant, row.prompt = one.at_s, one.model, one.prompt
        row.output = row.expected = one.output
    truth, seen = (_snapshot(facts, model, variants) for _ in range(2))
    return new_world(rows, truth, seen, new_state(seed), facts.max_ongoing)


def _snapshot(facts: Facts, model: Records, variants: Records) -> Snapshot:
    made = new_snapshot(facts.groups, len(variants), model)
    made.variants[0] = variants
    made.variants[0].load_s = LOAD_S
    made.held.where = IN_HOST_MEMORY
    return made


def _timed(world: World, i: int, path_s: float) -> Timed:
    outcome, asked = world.outcomes[i], world.asked[i]
    if outcome.state != DONE:
        raise RuntimeError(f"expected an answer to request {i}, got state {outcome.state}")
    tpot_s = (outcome.end_s - outcome.first_s) / max(1, asked.output - 1)
    return Timed(
        float(outcome.first_s - asked.arrival_s + path_s),
        float(tpot_s),
        float(outcome.end_s - asked.arrival_s + path_s),
    )
