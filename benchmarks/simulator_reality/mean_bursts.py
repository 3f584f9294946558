"""Step times from bursts of which only the mean TPOT of all requests is known.

Those that began first then waited for the prompts of the others: in a burst of long prompts, which fill
several steps, that is much of their TPOT. So the time of a cached token is searched with which the
simulator's own burst has the mean that was measured. Short prompts are filled in one step, beside which
nobody decodes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.simulator_reality.calibrating import context_s_of, long_of, step_times
from benchmarks.simulator_reality.loads import burst
from benchmarks.simulator_reality.seeing import Seen
from benchmarks.simulator_reality.simulated import simulate
from benchmarks.simulator_reality.types import Facts
from profiler.compiled import Records

HALVINGS = 24


def step_times_of_means(facts: Facts, seen: Sequence[Seen]) -> tuple[Records, Records]:
    """As `step_times`. As if nobody had waited, a cached token takes longest."""
    long = long_of(seen)
    low_s, high_s = 0.0, context_s_of(seen)
    for _ in range(HALVINGS):
        middle_s = (low_s + high_s) / 2
        if _mean_tpot_s(facts, seen, long, middle_s) < long.tpot_s:
            low_s = middle_s
        else:
            high_s = middle_s
    return step_times(facts, seen, high_s)


def _mean_tpot_s(facts: Facts, seen: Sequence[Seen], of: Seen, context_s: float) -> float:
    model, variants = step_times(facts, seen, context_s)
    times = simulate(facts, model, variants, burst(of.load, facts.groups))
    return statistics.mean(one.tpot_s for one in times)
