"""What variants of each kind cost, from fingerprints measured with synthetic variants.

The time of a load with variants, minus that of the same load without, divided by the layers, is what variants
add to a layer. For each kind that has three parts: launches for every adapted module, launches for every
(module, distinct variant), and reading and computing. They are fitted by non-negative least squares on
relative errors, held near the base's pace of reading and computing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from profiler.measurements import Point, Setting, Timing
from profiler.physical.calibration import Calibration, Cut, VariantCost, VariantCosts
from profiler.physical.variants import KindLoad, variant_load, work_s
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
    the same setting."""
    base = {(t.setting, t.point): t for t in alone}
    decode: defaultdict[str, list[Seen]] = defaultdict(list)
    prefill: defaultdict[str, list[Seen]] = defaultdict(list)
    for timing in mixed:
        kinds = {variant.kind for variant in timing.point.mix}
        other = base.get(_without(timing.setting, timing.point))
        if other is None or len(kinds) > 1:
            continue
        (kind,) = kinds
        decode[kind].append(_seen(calibration, timing, timing.tpot_s, other.tpot_s, 1.0))
        tokens = timing.point.input_tokens
        prefill[kind].append(_seen(calibration, timing, timing.ttft_last_s, other.ttft_last_s, tokens))
    return {kind: VariantCosts(_fit(decode[kind]), _fit(prefill[kind])) for kind in decode}


def _without(setting: Setting, point: Point) -> tuple[Setting, Point]:
    return setting, Point(point.batch, point.input_tokens)


def _seen(calibration: Calibration, timing: Timing, mixed_s: float, alone_s: float, tokens: float) -> Seen:
    made = {variant: synthetic_spec(calibration.spec, variant) for variant in timing.point.mix}
    load = variant_load(calibration.spec, [made[variant] for variant in timing.point.mix], timing.point.batch)
    (kind,) = load.kinds
    work = sum(work_s(calibration, Cut.of(timing.setting), kind, tokens))
    layers = timing.setting.layers
    return Seen(kind, work, max(0.0, mixed_s - alone_s) / layers, mixed_s / layers)


def _fit(seen: Sequence[Seen]) -> VariantCost:
    """Errors count relative to the whole step, for that is what repeats to a few percent."""
    rows = [np.array([step.load.modules, step.load.pairs, step.work_s]) / step.whole_s for step in seen]
    modules, pairs, _ = np.mean(rows, axis=0)
    # Pace is near one; where one load cannot tell launches apart, they are halved between the two.
    priors = [[0.0, 0.0, PRIOR_WEIGHT], [PRIOR_WEIGHT * modules, -PRIOR_WEIGHT * pairs, 0.0]]
    targets = [*(step.longer_s / step.whole_s for step in seen), PRIOR_WEIGHT, 0.0]
    matrix = np.array([*rows, *priors])
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-30)  # columns differ by orders of magnitude
    solution, _ = nnls(matrix / scale, np.array(targets))
    return VariantCost(*(solution / scale).tolist())
