"""Information that families share, because they ran on the same machine.

A layer's time per token is mostly its weights' bytes over the reading rate of that number format's kernel,
plus launches: tpot_layer = bytes s(format) + c. A regression over the other families, weighted by their
precision, predicts a noisy family's figure to within a few percent.
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

MIN_SPREAD = 0.03  # kernels of one format differ by at least this much
OVERHEAD_SPREAD = 0.25  # difference of models' all-reduces beyond the width of their messages
MIN_FAMILIES = 4
MIN_RATE = 0.3  # of the fastest format's rate
# Relative noise of one latency where rows do not repeat or overlap, and its bounds elsewhere.
NOISE, MIN_NOISE, MAX_NOISE = 0.006, 0.0015, 0.1
DEVIATION = 1.25  # standard deviation of a normal error over its mean absolute value
NORMAL_MEDIAN = 1.48  # the same over the median absolute value
SHARED = 0.2  # of the residuals' variance
EXPLAINED = 2.0  # a prediction from another depth errs by this many times a row's noise anyway
FEW = 6  # degrees of freedom that NOISE counts for
PROMPTS = np.geomspace(1, 16384, 169)
USUAL_PROMPT, PROMPT_SPREAD = 16.0, 2.0  # in tokens and as a logarithm; where fingerprints do not tell


@dataclass(frozen=True)
class Layer:
    """One family's layer: weights and the cache that a token reads, in bytes; time per token and its standard
    deviation in s."""

    family: Family
    weight_bytes: float
    tpot: float
    deviation: float
    cache_bytes: float = 0.0


def pooled_noise(fits: Sequence[LatencyFit]) -> float:
    """Relative standard deviation of one latency, from the disagreement of overlapping rows.

    An error that all families share in one plan is not noise but a missing law; then the noise is the
    default.
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
    """The share of the residuals' variance that families have in common; 0 where too few have the same
    plans."""
    known = [residuals for residuals in off if len(residuals) >= MIN_FAMILIES]
    total = sum(float(np.sum(residuals**2)) for residuals in known) / max(1, sum(map(len, known)))
    if total <= 0:
        return 0.0
    apart = sum(float(np.sum((residuals - residuals.mean()) ** 2)) for residuals in known)
    return 1 - apart / sum(len(residuals) - 1 for residuals in known) / total


def misfit_by_batch(fits: Sequence[LatencyFit], noise: Noise) -> Mapping[int, float]:
    """Relative errors of each batch's rows beyond their noise, in fits to all batches."""
    squares: dict[int, list[float]] = {}
    for fit in fits:
        for query, residual in fit.residuals.items():
            usual = noise.single if query.pipeline_parallel == 1 else noise.pipelines
            squares.setdefault(query.batch, []).append(residual**2 - usual**2)
    return {batch: max(0.0, float(np.mean(of_batch))) ** 0.5 for batch, of_batch in squares.items()}


def unexplained(noise: float, pipelines_error: float) -> Noise:
    """Noise with a lower weight for pipelines where plans of one stage do not predict them. `pipelines_error`
    is StageLaw.error.

    The unexplained error then belongs to the pipelines, not to the layers.
    """
    structure = (DEVIATION * pipelines_error) ** 2 - (EXPLAINED * noise) ** 2
    return Noise(noise, float((noise**2 + max(0.0, structure)) ** 0.5))


def layer_priors(layers: Sequence[Layer]) -> Mapping[Family, Prior]:
    """A prior for each family, from the others. Families without enough others are left out."""
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
    """One family's figure (s), its standard deviation, and the regressors."""

    row: Sequence[float]
    value: float
    deviation: float


def _regress(row: Sequence[float], seen: Sequence[Seen], min_spread: float) -> Prior | None:
    """The figure at `row` by non-negative weighted least squares over `seen`; None if that is not positive.

    `min_spread`: the smallest relative deviation of families from the law beyond their noise.
    """
    line = _line(seen, min_spread)
    value = float(np.array(row) @ line.slopes)
    own = float(np.array(row) @ line.covariance @ np.array(row))
    return Prior(value, float(np.sqrt(own + (line.spread * value) ** 2))) if value > 0 else None


@dataclass(frozen=True)
class _Line:
    """`spread`: the relative deviation of families from the line beyond their noise."""

    slopes: Array
    covariance: Array
    spread: float


def _line(seen: Sequence[Seen], min_spread: float) -> _Line:
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
    covariance = np.linalg.pinv(a.T @ a) / size[:, None] / size[None, :]
    return _Line(slopes / size, covariance, spread)


def _row(layer: Layer, formats: Sequence[str]) -> list[float]:
    return [layer.weight_bytes * (layer.family.dtype == dtype) for dtype in formats] + [1.0]


def overhead_priors(fits: Sequence[LatencyFit], hidden: Mapping[Family, float]) -> Mapping[Family, Priors]:
    """Priors from the other families for the excess cost of a layer's token at a wider TP over its share of
    the narrowest.

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
    """A line over the width. Families' errors beyond OVERHEAD_SPREAD count as noise."""
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
    """Priors for the work outside of layers, by TP: the same host's work for all families, and similar heads.

    Between noise and the bound at 0, a small figure comes out too large, and the layers' figures too small.
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
    """The median, and families' deviation from it beyond their own noise."""
    value = median(figure for figure, _ in known)
    apart = (1.5 * median(abs(figure - value) for figure, _ in known)) ** 2
    noise = median(deviation**2 for _, deviation in known)
    return Prior(value, max(apart - noise, (0.2 * floor) ** 2, 1e-24) ** 0.5)


def fixed_s(layers: Sequence[Layer]) -> float:
    """What a layer takes for a token whatever its bytes: launches and the host. It is the constant of a line
    through all families, as far as these separate it from reading: models of one size do not.

    A kernel for fewer bits does not read more bytes in a second than one for more bits, as both are bound by
    the memory and fewer bits are more work. Without this, noise of a few small layers decides.
    """
    formats = sorted({layer.family.dtype for layer in layers}, key=laws.weight_bytes_per_value)
    known = [layer for layer in layers if layer.tpot > 0]
    if len(known) < len(formats) + MIN_FAMILIES:
        return 0.0
    slower = formats[:-1]
    seen = [
        Seen([layer.weight_bytes + layer.cache_bytes, *_row(layer, slower)], layer.tpot, layer.deviation)
        for layer in known
    ]
    line = _line(seen, MIN_SPREAD)
    found, variance = float(line.slopes[-1]), float(line.covariance[-1, -1])
    certain = found**2 / (found**2 + variance) if found > 0 else 0.0
    return min(certain * found, min(layer.tpot for layer in known) / 2)


def reading_rates(layers: Sequence[Layer], fixed_s: float) -> Mapping[str, float]:
    """The rates at which kernels of each number format read weights, relative to the fastest format's.

    The fastest format gives the memory's bandwidth, and with it the GPU's FLOPs (laws.FLOPS_PER_BYTE). A
    format with slower kernels already takes longer for a token. So computing the token and reading its cache,
    which no format slows, have a smaller share. `fixed_s` of each layer is not reading.
    """
    rates: dict[str, list[float]] = {}
    for layer in layers:
        if layer.tpot > fixed_s:
            rates.setdefault(layer.family.dtype, []).append(layer.weight_bytes / (layer.tpot - fixed_s))
    usual = {dtype: median(of_dtype) for dtype, of_dtype in rates.items()}
    quickest = max(usual.values(), default=1.0)
    return {dtype: max(MIN_RATE, rate / quickest) for dtype, rate in usual.items()}


@dataclass(frozen=True)
class Growth:
    """BatchLaw.sequence and BatchLaw.message: properties of the host and the links, the same for all
    models."""

    sequence: float
    message: float


def shared_growth(fits: Sequence[LatencyFit]) -> Growth | None:
    """The medians over families with several batches; None where there are too few."""
    laws_of = [fit.law for fit in fits if len(fit.batches) > 1]
    if len(laws_of) < MIN_FAMILIES:
        return None
    return Growth(median(law.sequence for law in laws_of), median(law.message for law in laws_of))


def prompt_tokens(fits: Sequence[LatencyFit]) -> float:
    """The length of the prompts, which tables do not give: the length that best explains the prompts' times.

    A layer's prompt takes smooth_max(1, tokens x compute share) of its token's time. Formats of fewer bits
    have a larger share, so all formats together also show prompts too short to slow 16-bit weights.
    """
    against = ((np.log(PROMPTS) - np.log(USUAL_PROMPT)) / PROMPT_SPREAD) ** 2
    for fit in fits:
        ratio, sd = fit.prefill_ratio()
        share = laws.PROMPT_TOKEN * fit.law.compute * fit.law.reference
        expected = np.array([fit.law.prompt_pass(float(tokens) * share) for tokens in PROMPTS])
        against = against + _surprise(ratio, expected, np.hypot(sd, 0.3 * expected))
    return float(PROMPTS[int(np.argmin(against))])


def prompt_share(fit: LatencyFit, tokens: float) -> float:
    """BatchLaw.prompt: from the family's own figures where they are enough, else from the prompts' length."""
    ratio, sd = fit.prefill_ratio()
    reference = fit.law.reference
    grid = np.geomspace(1e-3, 1e3, 241)
    usual = laws.PROMPT_TOKEN * tokens * fit.law.compute
    expected = np.array([fit.law.prompt_pass(float(share) * reference) for share in grid])
    against = _surprise(ratio, expected, np.hypot(sd, 0.05 * expected)) + (np.log(grid / usual) / 0.5) ** 2
    return float(grid[int(np.argmin(against))])


def _surprise(ratio: float, expected: Array, deviation: Array) -> Array:
    """-2 log likelihood of the ratio of a prompt's time to a token's; at the fit's bound of 1, the true
    ratio may be lower."""
    if ratio <= 1 + 1e-9:
        return np.asarray(-2 * log_ndtr((1 - expected) / deviation), dtype=np.float64)
    return np.asarray(((expected - ratio) / deviation) ** 2 + 2 * np.log(deviation), dtype=np.float64)
