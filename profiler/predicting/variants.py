"""The time that variants add to the steps of one load, and its uncertainty."""

from __future__ import annotations

import math
from dataclasses import dataclass

from profiler.physical.calibration import Calibration, Cut
from profiler.physical.pipeline import AddedTime
from profiler.physical.prefill import PrefillSteps
from profiler.physical.variants import (
    VariantLoad,
    costs_of,
    decode_time,
    prefill_share,
    prefill_time,
    together_of,
)
from profiler.predicting.intervals import VARIANTS, VARIANTS_PER_DOUBLING
from profiler.types import Workload

MIN_LEFT = 0.2  # of what measured variants add: a range does not go below it


@dataclass(frozen=True)
class Variants:
    """Added seconds per layer, times `share`; `padded`: as if kernels pad."""

    calibration: Calibration
    cut: Cut
    load: VariantLoad
    input_tokens: int
    share: float = 1.0
    padded: bool = False

    def decode_s(self, sequences: float) -> float:
        found = decode_time(self.calibration, self.cut, self.load, sequences)
        return self.share * (max(found.added_s, found.padded_s) if self.padded else found.added_s)

    def prefill_s(self, step: PrefillSteps) -> float:
        share = prefill_share(self.load, step, self.input_tokens)
        found = prefill_time(self.calibration, self.cut, self.load, share)
        return self.share * (max(found.added_s, found.padded_s) if self.padded else found.added_s)


@dataclass(frozen=True)
class VariantErrors:
    """Relative errors of whole steps with variants; `is_measured`: every kind was measured."""

    decode: float = 0.0
    prefill: float = 0.0
    is_measured: bool = True


def variants_s(
    calibration: Calibration, cut: Cut, load: VariantLoad, workload: Workload
) -> tuple[AddedTime, ...]:
    """The expected time, and the lower and upper end of its range; empty for the base alone. Variants without
    measurements may be hidden behind the base's own work, or take twice the time of padding kernels."""
    if not load.kinds:
        return ()
    share = VARIANTS + VARIANTS_PER_DOUBLING * _doublings(calibration, load)
    measured = errors_of(calibration, load).is_measured
    least, most = (max(MIN_LEFT, 1 - share), 1 + share) if measured else (0.0, 2.0)
    expected = Variants(calibration, cut, load, workload.input_tokens)
    return (
        expected,
        Variants(calibration, cut, load, workload.input_tokens, least),
        Variants(calibration, cut, load, workload.input_tokens, most, padded=True),
    )


def _doublings(calibration: Calibration, load: VariantLoad) -> float:
    """How far (in doublings) the load's requests and variants exceed the measured ones, for the kind that is
    farthest."""
    beyond = [0.0]
    for kind in load.kinds:
        costs = costs_of(calibration, kind.kind)
        if costs and kind.pairs:
            rows, distinct = kind.rows / costs.widest, kind.distinct / costs.most
            beyond.append(max(0.0, math.log2(rows)) + max(0.0, math.log2(distinct)))
    return max(beyond)


def errors_of(calibration: Calibration, load: VariantLoad) -> VariantErrors:
    """Errors of the fits to the load's kinds of variants, and of the fit to all of them together."""
    costs = [costs_of(calibration, kind.kind) for kind in load.kinds]
    known = [cost for cost in costs if cost is not None]
    together = together_of(calibration, load)
    return VariantErrors(
        max((*(cost.decode.error for cost in known), together.decode_error)),
        max((*(cost.prefill.error for cost in known), together.prefill_error)),
        len(known) == len(costs),
    )
