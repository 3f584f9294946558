"""What variants add to the steps of one load, and how sure that is."""

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

MIN_LEFT = 0.2  # of what variants add, where they were measured: a range does not reach below


@dataclass(frozen=True)
class Variants:
    """Seconds of a layer, `share` times what is expected; with `padded` as if kernels pad."""

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
    """Of whole steps with variants, relative; `is_measured`: every kind was."""

    decode: float = 0.0
    prefill: float = 0.0
    is_measured: bool = True


def variants_s(
    calibration: Calibration, cut: Cut, load: VariantLoad, workload: Workload
) -> tuple[AddedTime, ...]:
    """What is expected, and the lower and upper end of its range; nothing for the base alone. Where variants
    were not measured they may be hidden behind the base's own work, and may take twice what they do when
    kernels pad them."""
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
    """How far the load's requests and variants are beyond those that were measured: of the kind that is
    farthest."""
    beyond = [0.0]
    for kind in load.kinds:
        costs = costs_of(calibration, kind.kind)
        if costs and kind.pairs:
            rows, distinct = kind.rows / costs.widest, kind.distinct / costs.most
            beyond.append(max(0.0, math.log2(rows)) + max(0.0, math.log2(distinct)))
    return max(beyond)


def errors_of(calibration: Calibration, load: VariantLoad) -> VariantErrors:
    """Of the fits to the kinds that the load has, and to what these take together."""
    costs = [costs_of(calibration, kind.kind) for kind in load.kinds]
    known = [cost for cost in costs if cost is not None]
    together = together_of(calibration, load)
    return VariantErrors(
        max((*(cost.decode.error for cost in known), together.decode_error)),
        max((*(cost.prefill.error for cost in known), together.prefill_error)),
        len(known) == len(costs),
    )
