"""One run of a scenario: one policy, one rate, one seed, a number of groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from controlplane.baselines.routing.choose import POLICIES
from controlplane.routing.snapshot import ELSEWHERE
from controlplane.routing.state import new_state
from controlplane.simulation import figures, host_memory, traces, traffic
from controlplane.simulation.admitting import Admitting
from controlplane.simulation.forms import Arrivals, ScenarioForm
from controlplane.simulation.measures import counted, measure
from controlplane.simulation.run import run
from controlplane.simulation.world import Rules, World, new_world, room_for_ended
from controlplane.traffic.request_queue import QueueLimits

GIB = 2**30


class Prepared(NamedTuple):
    """All arguments of `controlplane.simulation.run.run`."""

    world: World
    rules: Rules
    admitting: Admitting
    traffic: traffic.Traffic

    def run(self, until_s: float) -> None:
        run(self.world, self.rules, until_s, room_for_ended(self.world), self.admitting)


@dataclass(frozen=True)
class Case:
    """`rate_per_s` None: the trace's own rate. `groups`: the number of groups of each entry of the
    cluster."""

    policy: str
    rate_per_s: float | None
    seed: int
    groups: tuple[int, ...]


class Experiment:
    """A scenario whose cases can be run. Paths in it are relative to `folder`. Raises ScenarioError."""

    def __init__(self, form: ScenarioForm, folder: Path) -> None:
        self.form, self._folder = form, folder
        self._trace = None
        if form.traffic.arrivals is Arrivals.TRACE:
            assert form.traffic.file is not None
            self._trace = traces.read(folder / form.traffic.file)
        self._limit = form.engine.variant_limit or max(groups.slots for groups in form.cluster.groups)

    @property
    def counts(self) -> tuple[int, ...]:
        """The scenario's own groups."""
        return tuple(groups.count for groups in self.form.cluster.groups)

    @property
    def rates(self) -> Sequence[float | None]:
        return self.form.traffic.rates or (self.form.traffic.rate_per_s,)

    def run(self, case: Case) -> dict[str, Any]:
        """The measures of the requests after the warm-up (`measures.measure`)."""
        return self.watched(case)[1]

    def watched(self, case: Case) -> tuple[World, dict[str, Any]]:
        """As `run`, with the world at the end."""
        prepared, at = self.prepare(case), []
        for until_s in (self.form.warm_up_s, self.form.horizon_s):
            prepared.run(until_s)
            at.append(counted(prepared.world, until_s))
        prepared.run(math.inf)
        world = prepared.world
        return world, measure(self.form, world, prepared.traffic, at[0], at[1], self._gpus(case))

    def prepare(self, case: Case) -> Prepared:
        """A case's world before the first request comes."""
        gateway = self.form.gateway
        asked = traffic.requests(self.form, self._trace, case.rate_per_s, case.seed)
        world = self._world(case, asked)
        limits = QueueLimits(gateway.places, gateway.aging_s, gateway.turns)
        admitting = Admitting(world, asked.terms(), limits, gateway.refuse)
        return Prepared(world, self._rules(case), admitting, asked)

    def _rules(self, case: Case) -> Rules:
        engine, gateway = self.form.engine, self.form.gateway
        return Rules(
            POLICIES.index(case.policy),
            case.seed,
            engine.look_ahead,
            gateway.max_ongoing,
            float(gateway.tick_s),
            self._limit,
            float(engine.longest_wait_s),
            engine.almost_done_tokens,
        )

    def _world(self, case: Case, asked: traffic.Traffic) -> World:
        ranks = figures.draw_ranks(self.form.variants, np.random.default_rng((case.seed, 1)))
        counts = list(case.groups)
        truth, seen = (figures.snapshot(self.form, self._folder, ranks, counts) for _ in range(2))
        state = new_state(case.seed + 1)
        world = new_world(asked.asked, truth, seen, state, self.form.gateway.max_ongoing)
        host_gib = self.form.engine.host_gib
        host_memory.fill(world, np.inf if host_gib is None else host_gib * GIB)
        if not self.form.engine.warm:
            assert (world.seen.held.where[1:] == ELSEWHERE).all()
        return world

    def _gpus(self, case: Case) -> int:
        entries = zip(case.groups, self.form.cluster.groups, strict=True)
        return sum(count * groups.gpus for count, groups in entries)
