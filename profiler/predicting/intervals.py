"""How sure a figure is: ranges that should hold it nine times out of ten.

The fit's own error is measured; how fast certainty is lost away from what was measured is assumed, until the
errors against whole models on GPUs are known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from profiler.physical.variants import VariantTime
from profiler.types import Interval

Floats = npt.NDArray[np.float64]

# Shares of a figure.
NINE_IN_TEN = 1.645  # standard deviations
NOISE = 0.03  # of repeated runs
LAUNCH_S = 0.1e-3  # of a layer: steps of few tokens take what hosts take to launch them, and those differ
PER_DOUBLING = 0.10  # of the work beyond the largest measured, or of TP away from the nearest measured
PER_STAGE = 0.03  # of a pipeline
ELSEWHERE = 0.30  # scaled from another kind of device than the one that was measured
OTHER_QUANTIZATION = 0.30  # scaled from another quantization of the layers than the one that was measured
ROUGH_FACTOR = 3.0  # a roofline knows no launches and no caches
VARIANTS = 0.4  # of what variants add, where they were measured; assumed, for they are in a few loads only
# Of what is not weights or KV cache; `PLACED`: where ranks of other quantizations were in such a place.
MEASURED_MEMORY, PLACED_MEMORY, ALLOWED_MEMORY = 0.10, 0.20, 0.60


@dataclass(frozen=True)
class Ranges:
    """Of many figures: their values and ends, each [figures]."""

    value: Floats
    low: Floats
    high: Floats

    def plus(self, other: Ranges, times: int) -> Ranges:
        """The widest the sum with so many of `other` can be: errors of one profile go the same way."""
        return Ranges(
            self.value + times * other.value, self.low + times * other.low, self.high + times * other.high
        )

    def up_to(self, high: float) -> Ranges:
        """With ends that are at least this high."""
        return Ranges(self.value, self.low, np.maximum(self.high, high))

    def intervals(self) -> list[Interval]:
        return list(map(Interval, self.value.tolist(), self.low.tolist(), self.high.tolist()))


def widened(
    values_s: Floats, variants: VariantTime, layers: int, scale: float, shares: Sequence[float | Floats]
) -> Ranges:
    """`shares` of a figure: of all alike, or of each. Where variants were not measured they may be hidden
    behind the base's own work, and may take twice what they do when kernels pad them."""
    share = NINE_IN_TEN * np.sqrt(sum(np.square(error) for error in shares))
    alone, added, padded = values_s * scale, layers * variants.added_s, layers * variants.padded_s
    least, most = (1 - VARIANTS, 1 + VARIANTS) if variants.is_measured else (0.0, 2.0)
    low = (alone + least * added) / (1 + share)
    return Ranges(alone + added, low, (alone + most * max(added, padded)) * (1 + share))


def stretch(widest: float, work: float) -> float:
    """The share that is lost where a load has more work than any that was measured."""
    return PER_DOUBLING * max(0.0, math.log2(work / widest))


def roughly(value: float) -> Interval:
    return Interval(value, value / ROUGH_FACTOR, value * ROUGH_FACTOR)


def inverse(amount: float, seconds: Interval) -> Interval:
    return Interval(amount / seconds.value, amount / seconds.high, amount / seconds.low)
