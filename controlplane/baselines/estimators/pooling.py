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
from scipy.special import log_ndtr

from controlplane.baselines.estimators import laws
from controlplane.baselines.estimators.latency_fit import (
    TPOT_OTHER,
    TTFT_OTHER,
    LatencyFit,
    Noise,
    Prior,
    Priors,
)
from controlplane.baselines.estimators.types import Family

Array = NDArray[np.float64]

MIN_SPREAD = 0.03  # kernels of one format differ at least this much between models
MIN_FAMILIES = 4
MIN_RATE = 0.3  # of the quickest format's
# Noise of one latency over itself: where rows do not repeat or overlap, and bounds for what they say.
NOISE, MIN_NOISE, MAX_NOISE = 0.006, 0.0015, 0.1
DEVIATION = 1.25  # of a normal error, over its mean absolute value
NORMAL_MEDIAN = 1.48  # the same over the median of absolute values
SHARED = 0.2  # of the residuals' variance
EXPLAINED = 2.0  # a prediction from another depth errs by this many times a row's noise anyway
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
    """Relative standard deviation of one latency, from what overlapping rows disagree by.

    What all families disagree by in one plan is not noise but a law that is missing; then noise is as usual.
    """
    off = [np.array(residuals) for residuals in _by_plan(fits).values()]
    if not off:
        return NOISE
    every = np.concatenate(off)
    squared = (NORMAL_MEDIAN * float(np.median(np.abs(every)))) ** 2 * len(every) + FEW * NOISE**2
    noise = float((squared / (sum(fit.freedom for fit in fits) + FEW)) ** 0.5)
    if _shared(off) > SHARED:
        noise = min(noise, NOISE)
    return min(MAX_NOISE, max(MIN_NOISE, noise))


def _by_plan(fits: Sequence[LatencyFit]) -> Mapping[tuple[object, ...], list[float]]:
    """Residuals of all families by plan, output length and batch."""
    by_plan: dict[tuple[object, ...], list[float]] = {}
    for fit in fits:
        for query, residual in fit.residuals.items():
            plan = (query.tensor_parallel, query.layers_per_stage, query.output_tokens, query.batch)
            by_plan.setdefault(plan, []).append(residual)
    return by_plan


def _shared(off: Sequence[Array]) -> float:
    """How much of the residuals' variance is common to families; 0 where too few have the same plans."""
    known = [residuals for residuals in off if len(residuals) >= MIN_FAMILIES]
    total = sum(float(np.sum(residuals**2)) for residuals in known) / max(1, sum(map(len, known)))
    if total <= 0:
        return 0.0
    apart = sum(float(np.sum((residuals - residuals.mean()) ** 2)) for residuals in known)
    return 1 - apart / sum(len(residuals) - 1 for residuals in known) / total


def misfit_by_batch(fits: Sequence[LatencyFit], noise: Noise) -> Mapping[int, float]:
    """What rows of each batch are off by beyond their noise, relative, in fits to all batches."""
    squares: dict[int, list[float]] = {}
    for fit in fits:
        for query, residual in fit.residuals.items():
            usual = noise.single if query.pipeline_parallel == 1 else noise.pipelines
            squares.setdefault(query.batch, []).append(residual**2 - usual**2)
    return {batch: max(0.0, float(np.mean(of_batch))) ** 0.5 for batch, of_batch in squares.items()}


def unexplained(noise: float, pipelines_error: float) -> Noise:
    """Pipelines count less where plans of one stage do not tell them: `pipelines_error`, StageLaw.error.

    What no law says is then theirs, not the layers'.
    """
    structure = (DEVIATION * pipelines_error) ** 2 - (EXPLAINED * noise) ** 2
    return Noise(noise, float((noise**2 + max(0.0, structure)) ** 0.5))


def layer_priors(layers: Sequence[Layer]) -> Mapping[Family, Prior]:
    """A prior for each family, from the others. Families that others say nothing about are left out."""
    priors = {}
    for layer in layers:
        others = [other for other in layers if other.family != layer.family]
        same = [other for other in others if other.family.dtype == layer.family.dtype]
        if len(others) >= MIN_FAMILIES and len(same) >= 2:
            prior = _regress(layer, others)
            if prior is not None:
                priors[layer.family] = prior
    return priors


def _regress(layer: Layer, others: Sequence[Layer]) -> Prior | None:
    formats = sorted({other.family.dtype for other in others})
    design = np.array([_row(other, formats) for other in others])
    seen = np.array([other.tpot for other in others])
    size = np.maximum(np.abs(design).max(axis=0), 1e-300)
    spread = MIN_SPREAD
    for _ in range(4):
        sd = np.array([np.hypot(other.deviation, spread * max(other.tpot, 1e-300)) for other in others])
        a = design / size / sd[:, None]
        slopes = nnls(a, seen / sd)[0]
        off = (seen - design / size @ slopes) ** 2 - np.array([other.deviation**2 for other in others])
        freedom = max(1, len(others) - len(slopes))
        between = float(np.sum(off / np.maximum(seen, 1e-300) ** 2 / sd**2) / np.sum(1 / sd**2))
        spread = max(MIN_SPREAD, (max(0.0, between) * len(others) / freedom) ** 0.5)
    row = np.array(_row(layer, formats)) / size
    value = float(row @ slopes)
    own = float(row @ np.linalg.pinv(a.T @ a) @ row)
    return Prior(value, float(np.sqrt(own + (spread * value) ** 2))) if value > 0 else None


def _row(layer: Layer, formats: Sequence[str]) -> list[float]:
    return [layer.weight_bytes * (layer.family.dtype == dtype) for dtype in formats] + [1.0]


def outside_priors(fits: Sequence[LatencyFit]) -> Priors:
    """What is outside of layers, by TP: the same host's work for all families, and heads that differ little.

    Between noise and the bound at 0, a small figure comes out too large; the layers then pay for it.
    """
    priors = {}
    for tp in sorted({width for fit in fits for width in fit.widths}):
        for part in (TTFT_OTHER, TPOT_OTHER):
            known = [fit.figure(tp, part) for fit in fits if tp in fit.widths]
            if len(known) >= MIN_FAMILIES:
                priors[tp, part] = _usual(
                    known, floor=median(f.figure(tp, TPOT_OTHER)[0] for f in fits if tp in f.widths)
                )
    return priors


def _usual(known: Sequence[tuple[float, float]], floor: float) -> Prior:
    """The median, and how far families lie from it beyond what their own noise explains."""
    value = median(figure for figure, _ in known)
    apart = (1.5 * median(abs(figure - value) for figure, _ in known)) ** 2
    noise = median(deviation**2 for _, deviation in known)
    return Prior(value, max(apart - noise, (0.2 * floor) ** 2, 1e-24) ** 0.5)


def compute_shares(layers: Sequence[Layer]) -> Mapping[str, float]:
    """BatchLaw.compute by number format.

    The quickest format tells the memory's bandwidth, and with it the GPU's FLOPs (laws.FLOPS_PER_BYTE). A
    format whose kernels read slower takes longer for a token already, so that computing it weighs less.
    """
    rates: dict[str, list[float]] = {}
    for layer in layers:
        if layer.tpot > 0:
            rates.setdefault(layer.family.dtype, []).append(layer.weight_bytes / layer.tpot)
    usual = {dtype: median(of_dtype) for dtype, of_dtype in rates.items()}
    quickest = max(usual.values(), default=1.0)
    return {
        dtype: laws.compute_share(dtype) * max(MIN_RATE, rate / quickest) for dtype, rate in usual.items()
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
        expected = np.array([fit.law.prompt_pass(float(tokens) * share) for tokens in PROMPTS])
        against = against + _surprise(ratio, expected, np.hypot(sd, 0.3 * expected))
    return float(PROMPTS[int(np.argmin(against))])


def prompt_share(fit: LatencyFit, tokens: float) -> float:
    """BatchLaw.prompt: from the family's own figures where they tell, else from the prompts' length."""
    ratio, sd = fit.prefill_ratio()
    reference = fit.law.reference
    grid = np.geomspace(1e-3, 1e3, 241)
    usual = tokens * fit.law.compute
    expected = np.array([fit.law.prompt_pass(float(share) * reference) for share in grid])
    against = _surprise(ratio, expected, np.hypot(sd, 0.05 * expected)) + (np.log(grid / usual) / 0.5) ** 2
    return float(grid[int(np.argmin(against))])


def _surprise(ratio: float, expected: Array, deviation: Array) -> Array:
    """-2 log likelihood of a prompt's time over a token's; at 1, the fit's bound, it may be any less."""
    if ratio <= 1 + 1e-9:
        return np.asarray(-2 * log_ndtr((1 - expected) / deviation), dtype=np.float64)
    return np.asarray(((expected - ratio) / deviation) ** 2 + 2 * np.log(deviation), dtype=np.float64)
