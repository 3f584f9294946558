"""What families say about each other: they ran on the same machine.

A layer's time per token is mostly its weights' bytes over what a kernel of that number format reads per
second, plus launches: tpot_layer = bytes s(format) + c. Regressed over the other families, weighted by how
well each is known, it tells a family's figure to within a few percent when its own is noisy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from profiler.estimators import laws
from profiler.estimators.latency_fit import LatencyFit, Prior
from profiler.estimators.types import Family

Array = NDArray[np.float64]

LEAST_SPREAD = 0.03  # kernels of one format differ at least this much between models
LEAST_FAMILIES = 4
LEAST_RATE = 0.3  # of the quickest format's
# Noise of one latency over itself: where rows do not repeat or overlap, and bounds for what they say.
NOISE, LEAST_NOISE, MOST_NOISE = 0.006, 0.0015, 0.1
FEW = 6  # degrees of freedom's worth that NOISE counts for
PROMPTS = np.geomspace(1, 16384, 169)
USUAL_PROMPT, PROMPT_SPREAD = 16.0, 2.0  # in tokens and as a logarithm; where fingerprints do not tell


@dataclass(frozen=True)
class Layer:
    """One family's layer: weights in bytes, time per token and its standard deviation in s."""

    family: Family
    weight_bytes: float
    tpot: float
    deviation: float


def pooled_noise(fits: Sequence[LatencyFit]) -> float:
    """Relative standard deviation of one latency, from what overlapping rows disagree by."""
    squared = sum(fit.squared for fit in fits) + FEW * NOISE**2
    found = float((squared / (sum(fit.freedom for fit in fits) + FEW)) ** 0.5)
    return min(MOST_NOISE, max(LEAST_NOISE, found))


def layer_priors(layers: Sequence[Layer]) -> Mapping[Family, Prior]:
    """For each family what the others say; families that nothing can be said about are left out."""
    found = {}
    for layer in layers:
        others = [other for other in layers if other.family != layer.family]
        same = [other for other in others if other.family.dtype == layer.family.dtype]
        if len(others) >= LEAST_FAMILIES and len(same) >= 2:
            prior = _regress(layer, others)
            if prior is not None:
                found[layer.family] = prior
    return found


def _regress(layer: Layer, others: Sequence[Layer]) -> Prior | None:
    formats = sorted({other.family.dtype for other in others})
    design = np.array([_row(other, formats) for other in others])
    seen = np.array([other.tpot for other in others])
    size = np.maximum(np.abs(design).max(axis=0), 1e-300)
    spread = LEAST_SPREAD
    for _ in range(4):
        sd = np.array([np.hypot(other.deviation, spread * max(other.tpot, 1e-300)) for other in others])
        a = design / size / sd[:, None]
        slopes = nnls(a, seen / sd)[0]
        off = (seen - design / size @ slopes) ** 2 - np.array([other.deviation**2 for other in others])
        freedom = max(1, len(others) - len(slopes))
        between = float(np.sum(off / np.maximum(seen, 1e-300) ** 2 / sd**2) / np.sum(1 / sd**2))
        spread = max(LEAST_SPREAD, (max(0.0, between) * len(others) / freedom) ** 0.5)
    row = np.array(_row(layer, formats)) / size
    value = float(row @ slopes)
    own = float(row @ np.linalg.pinv(a.T @ a) @ row)
    return Prior(value, float(np.sqrt(own + (spread * value) ** 2))) if value > 0 else None


def _row(layer: Layer, formats: Sequence[str]) -> list[float]:
    return [layer.weight_bytes * (layer.family.dtype == dtype) for dtype in formats] + [1.0]


def compute_shares(layers: Sequence[Layer]) -> Mapping[str, float]:
    """BatchLaw.compute by number format.

    The quickest format tells the memory's bandwidth, and with it the GPU's FLOPs (laws.FLOPS_PER_BYTE). A
    format whose kernels read slower takes longer for a token already, so that computing it weighs less.
    """
    rates: dict[str, list[float]] = {}
    for layer in layers:
        if layer.tpot > 0:
            rates.setdefault(layer.family.dtype, []).append(layer.weight_bytes / layer.tpot)
    usual = {dtype: median(found) for dtype, found in rates.items()}
    quickest = max(usual.values(), default=1.0)
    return {
        dtype: laws.compute_share(dtype) * max(LEAST_RATE, rate / quickest) for dtype, rate in usual.items()
    }


def prompt_tokens(fits: Sequence[LatencyFit]) -> float:
    """The length of the prompts, which tables do not tell: what makes prompts take as long as they do.

    A layer's prompt takes smooth_max(1, tokens x compute share) of its token's time; formats of fewer bits
    have a larger share, so that together they show also prompts too short to slow 16-bit weights.
    """
    against = ((np.log(PROMPTS) - np.log(USUAL_PROMPT)) / PROMPT_SPREAD) ** 2
    for fit in fits:
        ratio, sd = fit.prefill_ratio()
        share = fit.law.compute * fit.law.reference
        expected = np.array([laws.smooth_max(1.0, float(tokens) * share) for tokens in PROMPTS])
        misfit = (expected - ratio) ** 2 / (sd**2 + (0.3 * expected) ** 2)
        against = against + misfit + np.log(sd**2 + (0.3 * expected) ** 2)
    return float(PROMPTS[int(np.argmin(against))])


def prompt_share(fit: LatencyFit, tokens: float) -> float:
    """BatchLaw.prompt: from the family's own figures where they tell, else from the prompts' length."""
    ratio, sd = fit.prefill_ratio()
    reference = fit.law.reference
    grid = np.geomspace(1e-3, 1e3, 241)
    usual = tokens * fit.law.compute
    expected = np.array([laws.smooth_max(1.0, float(share) * reference) for share in grid])
    against = ((expected - ratio) / np.maximum(sd, 0.05 * ratio)) ** 2 + (np.log(grid / usual) / 0.5) ** 2
    return float(grid[int(np.argmin(against))])
