"""Correct predictions by observations, with a factor that changes slowly, is bounded, and ignores outliers.

Compiled. The figures of a base's engines come from a profile, which was measured with other lengths and mixes
than those of the requests; a factor for each group corrects the difference.
"""

from __future__ import annotations

import math

from profiler.compiled import compiled

LEAST, MOST = 0.5, 2.0
# An observation counts as at most CLIP times the prediction, and at least 1 / CLIP of it. A step that fills
# prompts may take several times as long as the mean step, a pause of the machine a thousand times.
CLIP = 4.0
HORIZON_STEPS = 300.0


@compiled
def corrected(factor: float, observed_s: float, predicted_s: float, steps: float) -> float:
    """The factor after `steps` took `observed_s` together, each predicted (with `factor`) as `predicted_s`.

    Values that are not positive, finite numbers change nothing.
    """
    expected_s = steps * predicted_s
    if not (0.0 < observed_s < math.inf and 0.0 < expected_s < math.inf and steps > 0.0):
        return factor
    ratio = min(CLIP, max(1.0 / CLIP, observed_s / expected_s))
    weight = 1.0 - math.exp(-steps / HORIZON_STEPS)
    return min(MOST, max(LEAST, factor * (1.0 + weight * (ratio - 1.0))))


@compiled
def error(mean: float, observed_s: float, predicted_s: float, steps: float) -> float:
    """The running mean of relative errors of predictions, for a metric."""
    expected_s = steps * predicted_s
    if not (0.0 < observed_s < math.inf and 0.0 < expected_s < math.inf and steps > 0.0):
        return mean
    missed = min(CLIP, abs(observed_s / expected_s - 1.0))
    return mean + (1.0 - math.exp(-steps / HORIZON_STEPS)) * (missed - mean)
