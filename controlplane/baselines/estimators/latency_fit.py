"""Latency of one family, from all of its fingerprints at once.

Each measured TP has four figures, all at least 0, by weighted non-negative least squares over every row
(any n, o, PP and batch), as in MaverIQ's equations 1, 4 and 5 with a term for pipeline hops:

    L = n (ttft_layer + o tpot_layer) + ttft_other + o tpot_other + (PP-1) (ttft_hop + o tpot_hop)

Batches: a pass over the prompt takes ttft + tpot and o - 1 passes follow, so that each part grows by its own
law (laws.BatchLaw). With n = PP and PP + 1 layers for PP = 1, 2, ..., rows of other depths share the layer's
figure; its error falls several times below what two depths give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from controlplane.baselines.estimators import laws
from controlplane.baselines.estimators.laws import BatchLaw
from controlplane.baselines.estimators.tables import Point
from controlplane.baselines.estimators.types import Family, NotPredictable, Query

Array = NDArray[np.float64]

TTFT_LAYER, TPOT_LAYER, TTFT_OTHER, TPOT_OTHER = range(4)
TPOT_OVERHEAD = 4  # not fitted: the excess of TPOT_LAYER at a TP over its share of the narrowest TP's
HOP_SHARE = 0.05  # a hop relative to the step's work outside of layers, where no pipeline was measured
LAW_SHARE = 0.15  # deviation of a measured TP from the law of the others, relative to one layer's time
OUTLIER = 3.0  # residuals beyond this many standard deviations count less
UNKNOWN_ALLREDUCE = 0.2  # overhead of TP = 2 relative to TP = 1, where only one TP was measured


@dataclass(frozen=True)
class Prior:
    """A figure's expectation from other families: its value and standard deviation, s."""

    value: float
    deviation: float


# Priors by (TP, one of the four figures or TPOT_OVERHEAD).
Priors = Mapping[tuple[int, int], Prior]


@dataclass(frozen=True)
class Noise:
    """Relative standard deviation of one latency, for plans of one stage and of several stages."""

    single: float
    pipelines: float

    def of(self, point: Point) -> float:
        noise = self.single if point.query.pipeline_parallel == 1 else self.pipelines
        return noise / float(point.replicates**0.5)


@dataclass(frozen=True)
class LayerWork:
    """The cost of the layers in a pass: a number of layers' times, and seconds that do not depend on them.

    `prompt` and `token`: layers of a prompt's and of a token's pass. `constant_s`: over all passes.
    """

    prompt: float
    token: float
    constant_s: float = 0.0


ONE_LAYER = LayerWork(1.0, 1.0)

# The cost of layers in rows where it is not their number; see stage_law.
Works = Mapping[Query, LayerWork]


@dataclass(frozen=True)
class LatencyFit:
    """Coefficients: four per TP in `widths`, then the two hops; seconds."""

    family: Family
    widths: tuple[int, ...]
    plans: frozenset[tuple[int, int]]
    most_layers: int
    batches: tuple[int, ...]
    law: BatchLaw
    noise: Noise
    coefficients: Array
    covariance: Array
    residuals: Mapping[Query, float]  # relative, of each point
    freedom: int

    def tpot_layer(self) -> tuple[float, float]:
        """One layer's time per token at the smallest TP and batch, and its standard deviation."""
        return self.figure(self.widths[0], TPOT_LAYER)

    def figure(self, tp: int, part: int) -> tuple[float, float]:
        """One of the four figures at a measured TP, and its standard deviation."""
        at = 4 * self.widths.index(tp) + part
        return float(self.coefficients[at]), float(self.covariance[at, at] ** 0.5)

    def overhead(self, tp: int) -> tuple[float, float]:
        """TPOT_OVERHEAD at a measured TP, and its standard deviation; noise may make it negative."""
        row = np.zeros(len(self.coefficients))
        row[4 * self.widths.index(tp) + TPOT_LAYER] = 1.0
        row[TPOT_LAYER] -= self.widths[0] / tp
        return float(row @ self.coefficients), float((row @ self.covariance @ row) ** 0.5)

    def prefill_ratio(self) -> tuple[float, float]:
        """The ratio of a layer's time for the prompt to its time for a token, and its standard deviation."""
        token, token_sd = self.tpot_layer()
        if token <= 0:
            return 1.0, 1e6
        prompt, sd = float(self.coefficients[TTFT_LAYER]), float(self.covariance[0, 0] ** 0.5)
        ratio = 1 + prompt / token
        return ratio, float(np.hypot(sd / token, ratio * token_sd / token))


def fit_latency(
    family: Family, points: Sequence[Point], noise: Noise, law: BatchLaw, priors: Priors, works: Works
) -> LatencyFit:
    """Fit the points of every TP with `sufficient` points. Raises NotPredictable when no TP has them."""
    points = sufficient(points)
    if not points:
        raise NotPredictable(f"no fingerprints of two depths and two output lengths for {family}")
    widths = tuple(sorted({p.query.tensor_parallel for p in points}))
    seen = np.array([p.latency_s for p in points])
    work = [works.get(p.query) or _all_layers(p.query) for p in points]
    design = np.array([_row(p.query, w, widths, law) for p, w in zip(points, work, strict=True)])
    target = 1 - np.array([w.constant_s for w in work]) / seen
    design, sd = design / seen[:, None], np.array([noise.of(p) for p in points])
    soft, expected = _beliefs(family, points, widths, priors)
    weight = 1 / sd
    for _ in range(3):
        a = np.vstack([design * weight[:, None], soft])
        y = np.concatenate([weight * target, expected])
        size = np.maximum(np.linalg.norm(a, axis=0), 1e-300)
        coefficients = nnls(a / size, y)[0] / size
        residual = design @ coefficients - target
        weight = np.sqrt(np.minimum(1, OUTLIER * sd / np.maximum(np.abs(residual), 1e-300))) / sd
    scaled = a / size
    covariance = np.linalg.pinv(scaled.T @ scaled) / size[:, None] / size[None, :]
    return LatencyFit(
        family,
        widths,
        frozenset((p.query.tensor_parallel, p.query.pipeline_parallel) for p in points),
        max(p.query.layers for p in points),
        tuple(sorted({p.query.batch for p in points})),
        law,
        noise,
        coefficients,
        covariance,
        dict(zip((p.query for p in points), residual.tolist(), strict=True)),
        len(points) - int(np.linalg.matrix_rank(design)),
    )


def predicted_s(fit: LatencyFit, query: Query, works: Works) -> float:
    """The predicted seconds of a row of a measured TP."""
    work = works.get(query) or _all_layers(query)
    return float(_row(query, work, fit.widths, fit.law) @ fit.coefficients) + work.constant_s


def at_batch(fit: LatencyFit, rows: Sequence[Point]) -> LatencyFit:
    """The same fit with figures at the batch of `rows`, by its law."""
    batch = rows[0].query.batch
    outputs = float(np.mean([p.query.output_tokens for p in rows]))
    law = replace(fit.law, reference=batch, output_tokens=outputs)
    grown = np.zeros((len(fit.coefficients), len(fit.coefficients)))
    for at, width in enumerate(fit.widths):
        prompt, sharded, overhead, other, step, *_ = (
            form(fit, width, 1) * weights(fit.law, ONE_LAYER, 2, batch)[:, None]
        )
        token = sharded * fit.law.decode(batch, outputs) / fit.law.decode(batch, 2) + overhead
        grown[4 * at : 4 * at + 4] = prompt - token, token, other - step, step
    grown[-2:, -2:] = np.eye(2)
    return replace(
        fit,
        law=law,
        coefficients=np.maximum(0.0, grown @ fit.coefficients),
        covariance=grown @ fit.covariance @ grown.T,
    )


def figures_near(fit: LatencyFit, share: float) -> Priors:
    """Every figure of a fit as a prior. Its deviation combines the fit's deviation and `share` of the
    figure's whole."""
    priors = {}
    for at, width in enumerate(fit.widths):
        ttft_layer, tpot_layer, ttft_other, tpot_other = fit.coefficients[4 * at : 4 * at + 4]
        whole = (ttft_layer + tpot_layer, tpot_layer, ttft_other + tpot_other, tpot_other)
        for part, value in enumerate(fit.coefficients[4 * at : 4 * at + 4]):
            deviation = float(np.hypot(share * whole[part], fit.figure(width, part)[1]))
            priors[width, part] = Prior(float(value), max(deviation, 1e-24))
    return priors


def sufficient(points: Sequence[Point]) -> list[Point]:
    """The points of each TP with two depths at each of two output lengths: its four figures need them."""
    depths: dict[int, dict[int, set[int]]] = {}
    for p in points:
        by_output = depths.setdefault(p.query.tensor_parallel, {})
        by_output.setdefault(p.query.output_tokens, set()).add(p.query.layers)
    enough = {
        tp for tp, by_output in depths.items() if sum(len(layers) > 1 for layers in by_output.values()) > 1
    }
    return [p for p in points if p.query.tensor_parallel in enough]


def form(fit: LatencyFit, tp: int, pp: int) -> Array:
    """[7, coefficients]: the parts of a latency as combinations of the fitted coefficients; see `weights`.

    Rows: a layer's prompt; a layer's token, its sharded part and the part that TP adds; outside of layers the
    prompt and a token; the hops of the prompt and of a token.
    """
    width = len(fit.coefficients)
    prompt, token, sharded = (np.zeros(width) for _ in range(3))
    _add(prompt, fit, tp, TTFT_LAYER)
    _add(token, fit, tp, TPOT_LAYER)
    sharded[TPOT_LAYER] = fit.widths[0] / tp  # of TP = 1; the rest is overhead, which may not be < 0
    if token @ fit.coefficients < sharded @ fit.coefficients:
        sharded = token.copy()
    outside, step = np.zeros(width), np.zeros(width)
    _add(outside, fit, tp, TTFT_OTHER)
    _add(step, fit, tp, TPOT_OTHER)
    hop_prompt, hop_token = np.zeros(width), np.zeros(width)
    hop_prompt[-2] = hop_token[-1] = pp - 1
    hops = [hop_prompt + hop_token, hop_token]
    return np.array([prompt + token, sharded, token - sharded, outside + step, step, *hops])


def weights(law: BatchLaw, work: LayerWork, output_tokens: int, batch: int) -> Array:
    """[7] factors of the parts of `form`, in seconds of latency."""
    passes = output_tokens - 1
    token = work.token * passes
    return np.array(
        [
            work.prompt * law.prefill(batch),
            token * law.decode(batch, output_tokens),
            token * law.allreduce(batch),
            law.outside(batch),
            passes * law.outside(batch),
            1.0,
            passes,
        ]
    )


def refine(fit: LatencyFit, points: Sequence[Point], works: Works, reach: float) -> BatchLaw:
    """The batch law that fits rows of other batches best, held near the fit's own law.

    `reach`: how near; 1 where only the laws' own values are known.
    """
    known = [p for p in points if p.query.tensor_parallel >= fit.widths[0]]
    rows = [p for p in known if p.query.batch != fit.law.reference]
    if not rows:
        return fit.law
    forms = [form(fit, p.query.tensor_parallel, p.query.pipeline_parallel) @ fit.coefficients for p in rows]
    seen = np.array([p.latency_s for p in rows])
    parts = np.array(forms) / seen[:, None]
    work = [works.get(p.query) or _all_layers(p.query) for p in rows]
    layers = np.array([[w.prompt, w.token, w.token] for w in work])
    target = 1 - np.array([w.constant_s for w in work]) / seen
    passes = np.array([p.query.output_tokens - 1 for p in rows])
    # The law is evaluated once for each (output length, batch), of which there are few.
    loads = sorted({(p.query.output_tokens, p.query.batch) for p in rows})
    place = np.array([loads.index((p.query.output_tokens, p.query.batch)) for p in rows])
    names = ("compute", "prompt", "kv", "sequence", "message", "many")
    start = np.array([getattr(fit.law, name) for name in names])
    sd = np.array([0.4, 0.4 * reach, 0.4, 0.8 * reach, 0.8 * reach, 0.08])
    # A row's prediction has the coefficients' noise as well, about as much as the row itself.
    noise = np.array([1.5 * fit.noise.of(p) for p in rows])

    def moved(steps: Array) -> BatchLaw:
        law = replace(fit.law, **dict(zip(names, (start * np.exp(sd * steps)).tolist(), strict=True)))
        return replace(law, many=max(1.0, law.many))  # more rows never take less

    def misfit(steps: Array) -> Array:
        law = moved(steps)
        factors = np.array([weights(law, ONE_LAYER, 2, batch) for _, batch in loads])[place]
        decode = np.array([law.decode(batch, output) for output, batch in loads])[place]
        factors[:, 1] = decode
        factors[:, [1, 2, 4, 6]] *= passes[:, None]
        factors[:, :3] *= layers
        return np.concatenate([((factors * parts).sum(axis=1) - target) / noise, steps])

    fitted = least_squares(misfit, np.zeros(6), bounds=(-4, 4), loss="soft_l1", f_scale=3.0, max_nfev=60)
    return moved(fitted.x)


def _all_layers(query: Query) -> LayerWork:
    return LayerWork(query.layers, query.layers)


def _row(query: Query, work: LayerWork, widths: Sequence[int], law: BatchLaw) -> Array:
    """The design row of one fingerprint: `weights` in the columns of its TP and of the hops."""
    prompt, sharded, overhead, outside, step, hop_prompt, hop_token = weights(
        law, work, query.output_tokens, query.batch
    )
    row = np.zeros(4 * len(widths) + 2)
    at = 4 * widths.index(query.tensor_parallel)
    row[at + TTFT_LAYER], row[at + TPOT_LAYER] = prompt, prompt + overhead
    row[TPOT_LAYER] += (sharded - overhead) * widths[0] / query.tensor_parallel
    row[at + TTFT_OTHER], row[at + TPOT_OTHER] = outside, outside + step
    hops = query.pipeline_parallel - 1
    row[-2], row[-1] = hops * hop_prompt, hops * (hop_prompt + hop_token)
    return row


def _add(row: Array, fit: LatencyFit, tp: int, part: int) -> None:
    """Add the combination of coefficients that is `part` at `tp`: measured, or by the law from a neighbour.

    X(TP) = X(t) t / TP + growth (X(u) - X(t) t / u), t the smallest measured TP and u the nearest above it:
    MaverIQ's equation 2 for PP = 1, with the overhead (equation 3) clamped at 0.
    """
    widths, first = fit.widths, fit.widths[0]
    if tp in widths:
        row[4 * widths.index(tp) + part] = 1.0
        return
    row[part] = first / tp
    by = laws.exponents(fit.family.dtype, fit.family.int8_kv)
    if tp < first:
        return
    if len(widths) == 1:
        relative = laws.allreduce_growth(by, tp, 2 * first) if first == 1 else 1.0
        row[part] += UNKNOWN_ALLREDUCE * relative
        return
    near = min(widths[1:], key=lambda width: (abs(np.log(width / tp)), -width))
    column = 4 * widths.index(near) + part
    if fit.coefficients[column] <= fit.coefficients[part] * first / near:
        return
    growth = laws.allreduce_growth(by, tp, near)
    row[column] += growth
    row[part] -= growth * first / near


def _beliefs(
    family: Family, points: Sequence[Point], widths: Sequence[int], priors: Priors
) -> tuple[Array, Array]:
    """The prior's rows and their right sides, each divided by its standard deviation."""
    columns = 4 * len(widths) + 2
    step = _step_s(points)
    rows, expected = [], []

    def believe(parts: dict[int, float], value: float, deviation: float) -> None:
        row = np.zeros(columns)
        for column, factor in parts.items():
            row[column] = factor / deviation
        rows.append(row)
        expected.append(value / deviation)

    believe({columns - 1: 1.0}, HOP_SHARE * step, HOP_SHARE * step)
    believe({columns - 2: 1.0}, 0.0, step)
    by = laws.exponents(family.dtype, family.int8_kv)
    for at, width in enumerate(widths[2:], 2):  # the second and later follow the first two
        growth = laws.allreduce_growth(by, width, widths[1]) if widths[0] == 1 else 1.0
        layer = step / max(p.query.layers for p in points)
        for part in (TTFT_LAYER, TPOT_LAYER):
            scale = LAW_SHARE * layer * (10 if part == TTFT_LAYER else 1)
            believe(
                {
                    4 * at + part: 1.0,
                    part: growth * widths[0] / widths[1] - widths[0] / width,
                    4 + part: -growth,
                },
                0.0,
                scale,
            )
    for (tp, part), prior in sorted(priors.items()):
        if tp not in widths:
            continue
        if part == TPOT_OVERHEAD:
            at = 4 * widths.index(tp) + TPOT_LAYER
            believe({at: 1.0, TPOT_LAYER: -widths[0] / tp}, prior.value, prior.deviation)
        else:
            believe({4 * widths.index(tp) + part: 1.0}, prior.value, prior.deviation)
    return np.array(rows), np.array(expected)


def _step_s(points: Sequence[Point]) -> float:
    """A scale for priors: the least time per token of any fingerprint, prompt included."""
    return min(p.latency_s / p.query.output_tokens for p in points)
