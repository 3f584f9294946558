"""One run of a scenario: one policy, one rate, one seed, a number of groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from controlplane.gateway.waiting_line import LineLimits
from controlplane.routing.policies.choose import POLICIES
from controlplane.routing.snapshot import ELSEWHERE
from controlplane.routing.state import new_state
from controlplane.simulation import figures, host_memory, traces, traffic
from controlplane.simulation.admitting import Admitting
from controlplane.simulation.forms import Arrivals, ScenarioForm
from controlplane.simulation.measures import Counters, counted, measure
from controlplane.simulation.run import run
from controlplane.simulation.world import Rules, World, new_world, room_for_ended

GIB = 2**30


@dataclass(frozen=True)
class Case:
    """`rate_per_s` None: as the trace was recorded. `groups`: of each entry of the cluster."""

    policy: str
    rate_per_s: float | None
    seed: int
    groups: tuple[int, ...]


class Experiment:
    """A scenario, of which cases are run. Paths in it are relative to `folder`. Raises ScenarioError."""

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
        """What came of the requests after the warm-up (`measures.measure`)."""
        return self.watched(case)[1]

    def watched(self, case: Case) -> tuple[World, dict[str, Any]]:
        """The same, with the world as it was at the end."""
        form = self.form
        asked = traffic.requests(form, self._trace, case.rate_per_s, case.seed)
        world, rules = self._world(case, asked), self._rules(case)
        limits = LineLimits(form.gateway.places, form.gateway.aging_s, form.gateway.turns)
        admitting = Admitting(world, asked.terms(), limits, form.gateway.refuse)
        ended = room_for_ended(world)
        at: list[Counters] = []
        for until_s in (form.warm_up_s, form.horizon_s):
            run(world, rules, until_s, ended, admitting)
            at.append(counted(world, until_s))
        run(world, rules, np.inf, ended, admitting)
        return world, measure(form, world, asked, at[0], at[1], self._gpus(case))

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
        )

    def _world(self, case: Case, asked: traffic.Traffic) -> World:
        ranks = figures.draw_ranks(self.form.variants, np.random.default_rng((case.seed, 1)))
        counts = list(case.groups)
        truth, seen = (figures.snapshot(self.form, self._folder, ranks, counts) for _ in range(2))
        state = new_state(len(ranks), case.seed + 1)
        world = new_world(asked.asked, truth, seen, state, self.form.gateway.max_ongoing)
        host_gib = self.form.engine.host_gib
        host_memory.fill(world, np.inf if host_gib is None else host_gib * GIB)
        if not self.form.engine.warm:
            assert (world.seen.held.where[:, 1:] == ELSEWHERE).all()
        return world

    def _gpus(self, case: Case) -> int:
        entries = zip(case.groups, self.form.cluster.groups, strict=True)
        return sum(count * groups.gpus for count, groups in entries)
