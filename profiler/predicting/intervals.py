"""Uncertainty of figures: ranges that hold the actual value nine times out of ten.

The fit's own error is measured. How the uncertainty grows away from the measured loads is assumed, until the
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
NOISE = 0.03  # between repeated runs
LAUNCH_S = 0.1e-3  # per layer: the host's launches limit steps of few tokens, and hosts differ
# First tokens in an engine with kernels of variants: the base's came 6 to 18% later there than in the
# profile's engine without (benchmarks/results/mixes_h200.json).
OTHER_ENGINE = 0.10
PER_DOUBLING = 0.10  # of work beyond the largest measured work, or of TP away from the nearest measured TP
PER_STAGE = 0.03  # of a pipeline
ELSEWHERE = 0.30  # scaled from a measured device of another kind
OTHER_QUANTIZATION = 0.30  # scaled from another, measured quantization of the layers
ROUGH_FACTOR = 3.0  # a roofline ignores launches and caches
# What variants add where they were measured, and for each doubling of requests or variants beyond that;
# assumed, because few loads contain variants.
VARIANTS, VARIANTS_PER_DOUBLING = 0.25, 0.25
# Memory other than weights and KV cache; `PLACED`: ranks of other quantizations were measured in this place.
MEASURED_MEMORY, PLACED_MEMORY, ALLOWED_MEMORY = 0.10, 0.20, 0.60


@dataclass(frozen=True)
class Ranges:
    """Values of many figures, and the ends of their ranges, each [figures]."""

    value: Floats
    low: Floats
    high: Floats

    def plus(self, other: Ranges, times: int) -> Ranges:
        """The widest range of the sum with `times` of `other`: errors of one profile go in the same
        direction."""
        return Ranges(
            self.value + times * other.value, self.low + times * other.low, self.high + times * other.high
        )

    def up_to(self, high: float) -> Ranges:
        """Ranges whose upper ends are at least `high`."""
        return Ranges(self.value, self.low, np.maximum(self.high, high))

    def ordered(self) -> Ranges:
        """Ranges with non-negative values, and ends on either side of them."""
        value = np.maximum(self.value, 0.0)
        return Ranges(value, np.clip(self.low, 0.0, value), np.maximum(self.high, value))

    def intervals(self) -> list[Interval]:
        return list(map(Interval, self.value.tolist(), self.low.tolist(), self.high.tolist()))


def widened(figures: Sequence[Floats], scale: float, shares: Sequence[float | Floats]) -> Ranges:
    """Ranges of figures. `figures` are: without variants, as expected with them, and with the least and the
    most that variants may add. `shares`: relative errors, each one number or one per figure. `scale` applies
    only to the figures without variants."""
    share = NINE_IN_TEN * np.sqrt(sum(np.square(error) for error in shares))
    alone, expected, least, most = figures
    own = scale * alone
    value, low, high = (own + with_variants - alone for with_variants in (expected, least, most))
    return Ranges(value, low / (1 + share), high * (1 + share))


def stretch(widest: float, work: float) -> float:
    """The relative error of a load that has more work than every measured load."""
    return PER_DOUBLING * max(0.0, math.log2(work / widest))


def roughly(value: float) -> Interval:
    return Interval(value, value / ROUGH_FACTOR, value * ROUGH_FACTOR)


def inverse(amount: float, seconds: Interval) -> Interval:
    return Interval(amount / seconds.value, amount / seconds.high, amount / seconds.low)
