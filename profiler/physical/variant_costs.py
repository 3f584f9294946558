"""What variants of each kind cost, from fingerprints measured with synthetic variants.

The time of a load with variants, minus that of the same load without, divided by the layers, is what variants
add to a layer. For each kind that has three parts: launches for every module, launches for every (module,
distinct variant), and reading and computing. They are fitted by non-negative least squares on relative
errors, held near the base's pace of reading and computing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # which imports a part of itself when that is first used

from profiler.measurements import Point, Setting, Timing
from profiler.physical.calibration import Calibration, Cut, VariantCost, VariantCosts
from profiler.physical.variants import KindLoad, kind_s, variant_load, work_s
from profiler.variants.synthetic import synthetic_spec

PRIOR_WEIGHT = 0.005  # of the priors against one measurement


@dataclass(frozen=True)
class Seen:
    """One measured load, in seconds of a layer; `work_s` at the base's pace, `whole_s` with the base."""

    load: KindLoad
    work_s: float
    longer_s: float
    whole_s: float


def fit_variants(
    calibration: Calibration, mixed: Sequence[Timing], alone: Sequence[Timing]
) -> dict[str, VariantCosts]:
    """Costs by kind. A load counts if all its variants are of one kind and the base `alone` was measured in
    the same setting.

    Of what a load took, what its engine's other kinds take is taken off, so the kind that was measured alone
    comes first. A load of another kind shows what a kind's kernels take unused.
    """
    base = {(t.setting, t.point): t for t in alone}
    loads = [_Load(t, other) for t in mixed if (other := base.get(_without(t.setting, t.point)))]
    costs: dict[str, VariantCosts] = {}
    for kind, own in _by_kind([load for load in loads if len(load.kinds) == 1]):
        decode = [_seen(calibration, load, kind, costs) for load in own]
        prefill = [_seen(calibration, load, kind, costs, fills=True) for load in own]
        costs[kind] = VariantCosts(_fit(decode), _fit(prefill))
    return costs


@dataclass(frozen=True)
class _Load:
    """One with variants, and the base's alone."""

    mixed: Timing
    alone: Timing

    @property
    def kinds(self) -> set[str]:
        return {variant.kind for variant in self.mixed.point.mix}

    @property
    def launched(self) -> set[str]:
        return self.kinds | set(self.mixed.setting.launched)


def _by_kind(loads: Sequence[_Load]) -> Iterator[tuple[str, list[_Load]]]:
    """Each kind, with the loads in which nothing is launched but it and the kinds that came before."""
    fitted: set[str] = set()
    while ready := {next(iter(new)) for load in loads if len(new := load.launched - fitted) == 1}:
        kind = min(ready)
        fitted.add(kind)
        yield kind, [load for load in loads if kind in load.launched <= fitted]


def _without(setting: Setting, point: Point) -> tuple[Setting, Point]:
    return dataclasses.replace(setting, launched=()), Point(point.batch, point.input_tokens)


def _seen(
    calibration: Calibration,
    load: _Load,
    kind: str,
    known: Mapping[str, VariantCosts],
    fills: bool = False,
) -> Seen:
    """What `kind` takes of the load's decode step, or of its prefill, the others being `known`."""
    mixed, alone = load.mixed, load.alone
    made = {variant: synthetic_spec(calibration.spec, variant) for variant in mixed.point.mix}
    mix = [made[variant] for variant in mixed.point.mix]
    whole = variant_load(calibration.spec, mix, mixed.point.batch, mixed.setting.launched)
    tokens = mixed.point.input_tokens if fills else 1.0
    mixed_s, alone_s = (t.ttft_last_s if fills else t.tpot_s for t in (mixed, alone))
    longer_s, (own,) = (mixed_s - alone_s) / mixed.setting.layers, [k for k in whole.kinds if k.kind == kind]
    cut = Cut.of(mixed.setting)
    for other in whole.kinds:
        if other.kind != kind:
            costs = known[other.kind]
            longer_s -= kind_s(calibration, cut, other, costs.prefill if fills else costs.decode, tokens)
    work = sum(work_s(calibration, cut, own, tokens))
    return Seen(own, work, max(0.0, longer_s), mixed_s / mixed.setting.layers)


def _fit(seen: Sequence[Seen]) -> VariantCost:
    """Errors count relative to the whole step, for that is what repeats to a few percent."""
    rows = [np.array([step.load.modules, step.load.pairs, step.work_s]) / step.whole_s for step in seen]
    modules, pairs, _ = np.mean(rows, axis=0)
    # Pace is near one; where one load cannot tell launches apart, they are halved between the two.
    priors = [[0.0, 0.0, PRIOR_WEIGHT], [PRIOR_WEIGHT * modules, -PRIOR_WEIGHT * pairs, 0.0]]
    targets = [*(step.longer_s / step.whole_s for step in seen), PRIOR_WEIGHT, 0.0]
    matrix = np.array([*rows, *priors])
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-30)  # columns differ by orders of magnitude
    solution, _ = scipy.optimize.nnls(matrix / scale, np.array(targets))
    return VariantCost(*(solution / scale).tolist())
