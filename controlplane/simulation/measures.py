"""Results of a run's requests, and the engines' work, between the warm-up and the horizon."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from controlplane.simulation.engine import steps_s
from controlplane.simulation.forms import ScenarioForm
from controlplane.simulation.traffic import Traffic
from controlplane.simulation.world import (
    DISPLACED,
    DONE,
    LATE,
    LINE_FULL,
    REFUSED,
    TENANT_FULL,
    WOULD_BE_LATE,
    World,
)
from profiler.step_time.records import BASE_KIND, KIND_NUMBERS

PERCENTILES = (50, 90, 95, 99)
REASONS = {
    "wouldBeLate": WOULD_BE_LATE,
    "lineFull": LINE_FULL,
    "tenantFull": TENANT_FULL,
    "displaced": DISPLACED,
    "late": LATE,
}
Bools: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.float64]


class Counters(NamedTuple):
    """Totals of all engines since the beginning."""

    busy_s: float
    loads: int
    preemptions: int
    skips: int


def counted(world: World, now_s: float) -> Counters:
    """The totals at `now_s`, after the last event."""
    engines = world.engines
    busy_s = float(engines.busy_s.sum())
    for engine in engines:
        if engine.steps > 0:  # the part of the current steps
            busy_s += min(max(0.0, now_s - engine.start_s), float(_steps_s(engine, engine.steps)))
    return Counters(busy_s, *(int(engines[name].sum()) for name in ("loads", "preemptions", "skips")))


_steps_s = getattr(steps_s, "py_func", steps_s)


class _Times(NamedTuple):
    """[N], from the arrival: first token, mean of each further token, whole answer. Infinite: no answer."""

    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats


def measure(
    form: ScenarioForm, world: World, traffic: Traffic, start: Counters, end: Counters, gpus: int
) -> dict[str, Any]:
    """Attainment is the share of requests whose promises were all kept; refused and dropped requests count as
    broken promises. Times in seconds."""
    asked, outcomes = world.asked, world.outcomes
    measured = asked.arrival_s >= form.warm_up_s
    window_s = form.horizon_s - form.warm_up_s
    times = _times(world)
    kept = _kept(traffic, times)
    done = outcomes.state == DONE
    inside = done & (outcomes.end_s >= form.warm_up_s) & (outcomes.end_s < form.horizon_s)
    sent = measured & (outcomes.group >= 0)
    of_variants = sent & (asked.variant > 0)
    groups = len(world.engines)
    waited_s = np.where(sent, outcomes.sent_s - asked.arrival_s, 0.0)
    return {
        "requests": int(measured.sum()),
        "answered": int((measured & done).sum()),
        "refused": {
            name: int((measured & (outcomes.reason == code)).sum()) for name, code in REASONS.items()
        },
        "attainment": _by(form, world, traffic, measured, kept),
        "ttftS": _spread(times.ttft_s[measured & done]),
        "tpotS": _spread(times.tpot_s[measured & done & (asked.output > 1)]),
        "e2eS": _spread(times.e2e_s[measured & done]),
        "requestsPerS": float(inside.sum()) / window_s,
        "tokensPerS": float(asked.output[inside].sum()) / window_s,
        "coldStarts": _share(outcomes.cold[of_variants] > 0),
        "loads": end.loads - start.loads,
        "preemptions": end.preemptions - start.preemptions,
        "lineSkips": end.skips - start.skips,
        "utilisation": (end.busy_s - start.busy_s) / (groups * window_s),
        "longestWaitS": _most(times.ttft_s[measured & done]),
        "longestInLineS": _most(waited_s[measured]),
        "longestLine": int(world.gateway.longest[0]),
        "groupHours": groups * window_s / 3600,
        "gpuHours": gpus * window_s / 3600,
    }


def _times(world: World) -> _Times:
    asked, outcomes = world.asked, world.outcomes
    done = outcomes.state == DONE
    group = np.maximum(outcomes.group, 0)
    path_s = world.truth.models.path_s[world.engines.model[group]]
    decoding_s = (outcomes.end_s - outcomes.first_s) / np.maximum(1, asked.output - 1)
    return _Times(
        np.where(done, outcomes.first_s - asked.arrival_s + path_s, np.inf),
        np.where(done, decoding_s, np.inf),
        np.where(done, outcomes.end_s - asked.arrival_s + path_s, np.inf),
    )


def _kept(traffic: Traffic, times: _Times) -> Bools:
    limits = np.array(
        [
            [np.inf if limit is None else limit for limit in (one.ttft_s, one.tpot_s, one.deadline_s)]
            for one in traffic.terms_of_classes
        ]
    )[traffic.classes].T
    kept = np.isfinite(times.e2e_s)
    for taken_s, limit_s in zip(times, limits, strict=True):
        kept &= taken_s <= limit_s
    return np.asarray(kept)


def _by(form: ScenarioForm, world: World, traffic: Traffic, measured: Bools, kept: Bools) -> dict[str, Any]:
    kinds = world.truth.variants.kind[0][world.asked.variant]
    named = {"base": BASE_KIND} | KIND_NUMBERS
    admitted = measured & (world.outcomes.state != REFUSED)
    return {
        "all": _share(kept[measured]),
        "classes": {
            one.name: _share(kept[measured & (traffic.classes == number)])
            for number, one in enumerate(form.classes)
        },
        "ofAdmitted": {
            one.name: _share(kept[admitted & (traffic.classes == number)])
            for number, one in enumerate(form.classes)
        },
        "kinds": {
            name: _share(kept[measured & (kinds == number)])
            for name, number in named.items()
            if (kinds == number).any()
        },
    }


def _share(which: Bools) -> float | None:
    return float(which.mean()) if len(which) else None


def _most(values: Floats) -> float | None:
    return float(values.max()) if len(values) else None


def _spread(values: Floats) -> dict[str, float | None]:
    if not len(values):
        return {"mean": None, **{f"p{percent}": None for percent in PERCENTILES}}
    found = np.percentile(values, PERCENTILES)
    percentiles = {f"p{percent}": float(value) for percent, value in zip(PERCENTILES, found, strict=True)}
    return {"mean": float(values.mean()), **percentiles}
