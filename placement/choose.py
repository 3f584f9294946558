"""Which plans meet an intent, best first (MaverIQ, sections 4 and 6: rank all, place in order)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from placement.types import Candidate, Infeasible, Intent, Slos

GIB = 2**30
MAX_RELAXATIONS = 5


@dataclass(frozen=True)
class Limit:
    """One SLO as a predicate over a measured value; `at_most` is False for a lower bound."""

    name: str
    bound: float
    unit: str
    value: Callable[[Candidate], float]
    at_most: bool = True

    def holds(self, candidate: Candidate) -> bool:
        value = self.value(candidate)
        return value <= self.bound if self.at_most else value >= self.bound

    def nearest(self, candidates: Sequence[Candidate]) -> float:
        """The value that comes closest to the bound among candidates that break it."""
        values = [self.value(candidate) for candidate in candidates]
        return min(values) if self.at_most else max(values)

    def shown(self, value: float) -> str:
        """Four digits, rounded to the safe side: a limit set to the shown number is met."""
        return f"{rounded(value, up=self.at_most):.10g}{self.unit}"

    def relaxed_to(self, value: float) -> str:
        verb = "raise" if self.at_most else "lower"
        return f"{verb} {self.name} from {self.bound:.10g} to {self.shown(value)}"


def cost_gib_s(candidate: Candidate, output_tokens: int) -> float:
    """Memory of all ranks x latency of one request, in GiB-seconds (MaverIQ section 4, formulation 1)."""
    return sum(candidate.estimate.memory_bytes) / GIB * candidate.estimate.latency_s(output_tokens)


def choose(
    candidates: Sequence[Candidate], intent: Intent, slos: Slos, output_tokens: int
) -> tuple[Candidate, ...] | Infeasible:
    """The candidates that keep every limit in `slos` (whatever the intent), best for `intent` first.

    Latency and cost are those of one request of `output_tokens`. The order depends on the candidates
    alone, not on how they were listed. Never empty: Infeasible names the binding limit and what would do.
    """
    if not candidates:
        return Infeasible("no plan can be made for this model on this cluster's devices")
    limits = limits_of(slos, output_tokens)
    feasible = [c for c in candidates if all(limit.holds(c) for limit in limits)]
    if not feasible:
        return _infeasible(candidates, limits)
    return tuple(sorted(feasible, key=lambda c: _rank(c, intent, output_tokens)))


def limits_of(slos: Slos, output_tokens: int) -> tuple[Limit, ...]:
    """The limits that are set, in the order they are explained."""
    every = (
        ("accuracy", slos.accuracy, "", lambda c: c.estimate.accuracy, False),
        ("latency_s", slos.latency_s, " s", lambda c: c.estimate.latency_s(output_tokens), True),
        ("ttft_s", slos.ttft_s, " s", lambda c: c.estimate.ttft_s, True),
        ("tpot_s", slos.tpot_s, " s", lambda c: c.estimate.tpot_s, True),
        ("cost_gib_s", slos.cost_gib_s, " GiB s", lambda c: cost_gib_s(c, output_tokens), True),
    )
    return tuple(
        Limit(name, bound, unit, value, at_most)
        for name, bound, unit, value, at_most in every
        if bound is not None
    )


def rounded(value: float, *, up: bool) -> float:
    """To four significant digits, never to the other side of `value`."""
    if value == 0 or not math.isfinite(value):
        return value
    step = 10.0 ** (math.floor(math.log10(abs(value))) - 3)
    steps = (math.ceil if up else math.floor)(value / step)
    near = float(f"{steps * step:.10g}")
    if near < value if up else near > value:  # the division rounded to the wrong side
        near = float(f"{(steps + (1 if up else -1)) * step:.10g}")
    return near


def _rank(candidate: Candidate, intent: Intent, output_tokens: int) -> tuple[object, ...]:
    """Objective, then the other one, then the fewest ranks, then the plan itself."""
    cost, latency = cost_gib_s(candidate, output_tokens), candidate.estimate.latency_s(output_tokens)
    objectives = (latency, cost) if intent is Intent.MIN_LATENCY else (cost, latency)
    plan = candidate.plan
    shape = (plan.world_size, plan.tensor_parallel, plan.layers_per_stage, plan.quantization)
    return (*objectives, -candidate.estimate.accuracy, *shape, repr(candidate))


def _infeasible(candidates: Sequence[Candidate], limits: Sequence[Limit]) -> Infeasible:
    alone = [limit for limit in limits if not any(limit.holds(c) for c in candidates)]
    if alone:
        faults = (
            f"{x.name} {x.bound:.10g} is out of reach, the best is {x.shown(x.nearest(candidates))}"
            for x in alone
        )
        reason = "; ".join(faults)
    else:
        together = " and ".join(limit.name for limit in limits)
        reason = f"no plan keeps {together} together, though some plan keeps each alone"
    return Infeasible(f"{reason} ({len(candidates)} plans considered)", _relaxations(candidates, limits))


def _relaxations(candidates: Sequence[Candidate], limits: Sequence[Limit]) -> tuple[str, ...]:
    """Every single limit whose relaxation suffices; where none does, the plan that needs least."""
    singles = []
    for limit in limits:
        others = [other for other in limits if other is not limit]
        near = [c for c in candidates if all(other.holds(c) for other in others)]
        if near:
            singles.append(limit.relaxed_to(limit.nearest(near)))
    if singles:
        return tuple(singles[:MAX_RELAXATIONS])
    nearest = min(candidates, key=lambda c: (max(_excess(limit, c) for limit in limits), repr(c)))
    return (" and ".join(x.relaxed_to(x.value(nearest)) for x in limits if not x.holds(nearest)),)


def _excess(limit: Limit, candidate: Candidate) -> float:
    """By what factor a limit is broken; 0 when kept."""
    if limit.holds(candidate):
        return 0.0
    low, high = sorted((abs(limit.bound), abs(limit.value(candidate))))
    return high / low if low else math.inf
