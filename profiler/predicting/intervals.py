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

from profiler.types import Interval

Floats = npt.NDArray[np.float64]

# Shares of a figure.
NINE_IN_TEN = 1.645  # standard deviations
NOISE = 0.03  # of repeated runs
LAUNCH_S = 0.1e-3  # of a layer: steps of few tokens take what hosts take to launch them, and those differ
# Of first tokens, in an engine that has kernels of variants: the base's came 6 to 18% later there than in the
# profile's engine without (benchmarks/results/mixes_h200.json).
OTHER_ENGINE = 0.10
PER_DOUBLING = 0.10  # of the work beyond the largest measured, or of TP away from the nearest measured
PER_STAGE = 0.03  # of a pipeline
ELSEWHERE = 0.30  # scaled from another kind of device than the one that was measured
OTHER_QUANTIZATION = 0.30  # scaled from another quantization of the layers than the one that was measured
ROUGH_FACTOR = 3.0  # a roofline knows no launches and no caches
# Of what variants add, where they were measured, and for each doubling of requests or variants beyond;
# assumed, for they are in a few loads only.
VARIANTS, VARIANTS_PER_DOUBLING = 0.25, 0.25
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

    def ordered(self) -> Ranges:
        """With values that are not negative, and ends on either side of them."""
        value = np.maximum(self.value, 0.0)
        return Ranges(value, np.clip(self.low, 0.0, value), np.maximum(self.high, value))

    def intervals(self) -> list[Interval]:
        return list(map(Interval, self.value.tolist(), self.low.tolist(), self.high.tolist()))


def widened(figures: Sequence[Floats], scale: float, shares: Sequence[float | Floats]) -> Ranges:
    """Of `figures` without variants, as expected with them, and with the least and the most that they may
    add. `shares` of a figure: of all alike, or of each. `scale` is of what has no variants."""
    share = NINE_IN_TEN * np.sqrt(sum(np.square(error) for error in shares))
    alone, expected, least, most = figures
    own = scale * alone
    value, low, high = (own + with_variants - alone for with_variants in (expected, least, most))
    return Ranges(value, low / (1 + share), high * (1 + share))


def stretch(widest: float, work: float) -> float:
    """The share that is lost where a load has more work than any that was measured."""
    return PER_DOUBLING * max(0.0, math.log2(work / widest))


def roughly(value: float) -> Interval:
    return Interval(value, value / ROUGH_FACTOR, value * ROUGH_FACTOR)


def inverse(amount: float, seconds: Interval) -> Interval:
    return Interval(amount / seconds.value, amount / seconds.high, amount / seconds.low)
