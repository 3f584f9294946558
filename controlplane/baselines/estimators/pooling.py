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
    TPOT_OVERHEAD,
    TTFT_OTHER,
    LatencyFit,
    Noise,
    Prior,
    Priors,
)
from controlplane.baselines.estimators.types import Family

Array = NDArray[np.float64]

MIN_SPREAD = 0.03  # kernels of one format differ at least this much between models
OVERHEAD_SPREAD = 0.25  # how far models' all-reduces differ beyond the width of their messages
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
            formats = sorted({other.family.dtype for other in others})
            seen = [Seen(_row(other, formats), other.tpot, other.deviation) for other in others]
            prior = _regress(_row(layer, formats), seen, MIN_SPREAD)
            if prior is not None:
                priors[layer.family] = prior
    return priors


@dataclass(frozen=True)
class Seen:
    """One family's figure (s), its standard deviation, and what the figure is regressed over."""

    row: Sequence[float]
    value: float
    deviation: float


def _regress(row: Sequence[float], seen: Sequence[Seen], min_spread: float) -> Prior | None:
    """The figure at `row` by non-negative weighted least squares over `seen`; None if that is not positive.

    `min_spread`: how far families lie from the law beyond their noise at least, relative.
    """
    design = np.array([one.row for one in seen])
    values, noise = np.array([one.value for one in seen]), np.array([one.deviation for one in seen])
    size = np.maximum(np.abs(design).max(axis=0), 1e-300)
    scale = np.maximum(values, 1e-300)
    spread = min_spread
    for _ in range(4):
        sd = np.hypot(noise, spread * scale)
        a = design / size / sd[:, None]
        slopes = nnls(a, values / sd)[0]
        off = (values - design / size @ slopes) ** 2 - noise**2
        freedom = max(1, len(seen) - len(slopes))
        between = float(np.sum(off / scale**2 / sd**2) / np.sum(1 / sd**2))
        spread = max(min_spread, (max(0.0, between) * len(seen) / freedom) ** 0.5)
    scaled = np.array(row) / size
    value = float(scaled @ slopes)
    own = float(scaled @ np.linalg.pinv(a.T @ a) @ scaled)
    return Prior(value, float(np.sqrt(own + (spread * value) ** 2))) if value > 0 else None


def _row(layer: Layer, formats: Sequence[str]) -> list[float]:
    return [layer.weight_bytes * (layer.family.dtype == dtype) for dtype in formats] + [1.0]


def overhead_priors(fits: Sequence[LatencyFit], hidden: Mapping[Family, float]) -> Mapping[Family, Priors]:
    """What a layer's token costs at a wider TP beyond its share of the narrowest, from the other families.

    That is the all-reduces' time: the same machine's for all, with messages as wide as the hidden states.
    `hidden`: that width by family, in any unit; families without one are left out.
    """
    known = [fit for fit in fits if fit.family in hidden and len(fit.widths) > 1]
    priors: dict[Family, dict[tuple[int, int], Prior]] = {}
    for first, tp in sorted({(fit.widths[0], tp) for fit in known for tp in fit.widths[1:]}):
        alike = [fit for fit in known if fit.widths[0] == first and tp in fit.widths]
        for fit in alike:
            others = [other for other in alike if other.family != fit.family]
            if len(others) >= MIN_FAMILIES:
                priors.setdefault(fit.family, {})[tp, TPOT_OVERHEAD] = _overhead(
                    fit.family, others, tp, hidden
                )
    return priors


def _overhead(family: Family, others: Sequence[LatencyFit], tp: int, hidden: Mapping[Family, float]) -> Prior:
    """A line over the width. What families are off it by beyond OVERHEAD_SPREAD is taken for noise."""
    design = np.array([[1.0, hidden[fit.family]] for fit in others])
    row = np.array([1.0, hidden[family]])
    size = design.max(axis=0)
    values, noise = np.array([fit.overhead(tp) for fit in others]).T
    usual = max(float(np.median(values)), 0.0)
    sd = np.hypot(noise, OVERHEAD_SPREAD * usual)
    for _ in range(3):
        a = design / size / sd[:, None]
        slopes = nnls(a, values / sd)[0]
        off = np.abs(values - design / size @ slopes)
        sd = np.maximum(np.hypot(noise, OVERHEAD_SPREAD * usual), np.minimum(off, 3 * sd))
    chi = max(1.0, float(np.median(off / np.hypot(noise, OVERHEAD_SPREAD * usual))) * NORMAL_MEDIAN)
    value = float(row / size @ slopes)
    own = chi**2 * float(row / size @ np.linalg.pinv(a.T @ a) @ (row / size))
    return Prior(value, float(np.hypot(own**0.5, OVERHEAD_SPREAD * max(value, usual))))


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


def reading_rates(layers: Sequence[Layer]) -> Mapping[str, float]:
    """How fast kernels of each number format read weights, over the quickest format's.

    The quickest format tells the memory's bandwidth, and with it the GPU's FLOPs (laws.FLOPS_PER_BYTE). A
    format whose kernels read slower takes longer for a token already, so that computing the token and
    reading its cache, which no format slows, weigh less.
    """
    rates: dict[str, list[float]] = {}
    for layer in layers:
        if layer.tpot > 0:
            rates.setdefault(layer.family.dtype, []).append(layer.weight_bytes / layer.tpot)
    usual = {dtype: median(of_dtype) for dtype, of_dtype in rates.items()}
    quickest = max(usual.values(), default=1.0)
    return {dtype: max(MIN_RATE, rate / quickest) for dtype, rate in usual.items()}


@dataclass(frozen=True)
class Growth:
    """BatchLaw.sequence and BatchLaw.message: what the host and the links do, whichever model runs."""

    sequence: float
    message: float


def shared_growth(fits: Sequence[LatencyFit]) -> Growth | None:
    """The medians over families with several batches; None where these are too few."""
    laws_of = [fit.law for fit in fits if len(fit.batches) > 1]
    if len(laws_of) < MIN_FAMILIES:
        return None
    return Growth(median(law.sequence for law in laws_of), median(law.message for law in laws_of))


def prompt_tokens(fits: Sequence[LatencyFit]) -> float:
    """The length of the prompts, which tables do not tell: what makes prompts take as long as they do.

    A layer's prompt takes smooth_max(1, tokens x compute share) of its token's time; formats of fewer bits
    have a larger share, so that together they show also prompts too short to slow 16-bit weights.
    """
    against = ((np.log(PROMPTS) - np.log(USUAL_PROMPT)) / PROMPT_SPREAD) ** 2
    for fit in fits:
        ratio, sd = fit.prefill_ratio()
        share = laws.PROMPT_TOKEN * fit.law.compute * fit.law.reference
        expected = np.array([fit.law.prompt_pass(float(tokens) * share) for tokens in PROMPTS])
        against = against + _surprise(ratio, expected, np.hypot(sd, 0.3 * expected))
    return float(PROMPTS[int(np.argmin(against))])


def prompt_share(fit: LatencyFit, tokens: float) -> float:
    """BatchLaw.prompt: from the family's own figures where they tell, else from the prompts' length."""
    ratio, sd = fit.prefill_ratio()
    reference = fit.law.reference
    grid = np.geomspace(1e-3, 1e3, 241)
    usual = laws.PROMPT_TOKEN * tokens * fit.law.compute
    expected = np.array([fit.law.prompt_pass(float(share) * reference) for share in grid])
    against = _surprise(ratio, expected, np.hypot(sd, 0.05 * expected)) + (np.log(grid / usual) / 0.5) ** 2
    return float(grid[int(np.argmin(against))])


def _surprise(ratio: float, expected: Array, deviation: Array) -> Array:
    """-2 log likelihood of a prompt's time over a token's; at 1, the fit's bound, it may be any less."""
    if ratio <= 1 + 1e-9:
        return np.asarray(-2 * log_ndtr((1 - expected) / deviation), dtype=np.float64)
    return np.asarray(((expected - ratio) / deviation) ** 2 + 2 * np.log(deviation), dtype=np.float64)
