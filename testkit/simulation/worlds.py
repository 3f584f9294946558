"""Small worlds for the simulator, with numbers that a test chooses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from controlplane.baselines.routing.choose import POLICIES
from controlplane.routing.snapshot import IN_HOST_MEMORY, IN_SLOT, Snapshot, new_snapshot
from controlplane.routing.state import new_state
from controlplane.simulation.world import Rules, World, new_asked, new_world
from profiler.compiled import records
from profiler.step_time.records import PREFILL_KNOTS, STEP_MODEL
from testkit.simulation.stepwise import Asked, Machine


def rules(policy: str = "most-idle", look_ahead: int = 0, max_ongoing: int = 1000, limit: int = 8) -> Rules:
    return Rules(POLICIES.index(policy), 1, look_ahead, max_ongoing, 5.0, limit, 30.0)


def snapshot(machine: Machine, groups: int) -> Snapshot:
    model = records(STEP_MODEL, 1)
    model.decode_s = machine.base_s + machine.each_s * np.arange(model.decode_s.shape[1])
    model.prefill_grain = machine.budget / PREFILL_KNOTS
    model.prefill_s = machine.prefill_s(0) + machine.token_s * machine.budget * np.linspace(
        0, 1, PREFILL_KNOTS + 1
    )
    model.context_s, model.launch_s = machine.cached_s, machine.launch_s
    model.batched_tokens, model.max_rows = machine.budget, machine.most_rows
    model.wide_from, model.wide_launch_s = machine.wide_from, machine.wide_launch_s
    model.kv_tokens, model.slots = machine.kv_tokens, max(1, len(machine.row_s) - 1)
    made = new_snapshot(groups, len(machine.row_s), model)
    made.variants.kind[0, 1:] = 0
    made.variants.row_s[0] = machine.row_s
    made.variants.token_s[0] = machine.prompt_s
    made.variants.load_s[0] = machine.load_s
    made.variants.wide_variant_s[0] = machine.wide_variant_s
    made.variants.wide_token_s[0] = machine.wide_prompt_s
    made.held.where = IN_HOST_MEMORY
    made.held.where[0] = IN_SLOT
    return made


def new(machine: Machine, requests: Sequence[Asked], groups: int = 1, max_ongoing: int = 1000) -> World:
    asked = new_asked(len(requests))
    for name in Asked._fields:
        asked[name] = [getattr(one, name) for one in requests]
    asked.expected = asked.output
    asked.ttft_s = asked.tpot_s = math.inf
    truth, seen = snapshot(machine, groups), snapshot(machine, groups)
    return new_world(asked, truth, seen, new_state(1), max_ongoing)
