"""The extra cost of stages of very few layers, and the choice of the law that describes it best.

A pipeline of 1 or 2 layers a stage does not run like a pipeline of 10 layers a stage. Its stages may end
before the host has launched the next stage, or wait for each other. A pass through the layers of a pipeline
takes

    sum over stages of max(floor, w_i t),    w_i = (1 - wait) l_i + wait max(l)

of l_i layers of t seconds each. `floor`: a stage's least time, s. `wait`: the share by which shorter stages
wait for the longest. Both belong to the host and the engine, so all families of a table share them; with both
0, stages add up. Full models hide the floor; their fingerprints would add it to them, 20 times over.

Before a token's pass the host of each rank prepares the rank's layers. All ranks do this at the same time, so
a pipeline waits for its longest stage only:

    saved = prepared (sum of l_i - max(l))

`prepared`: seconds a layer. It is a part of the time that a layer takes whatever its bytes (pooling.fixed_s).
Fingerprints of 1 or 2 layers a stage cannot separate it from hops: both grow with the number of stages.

Cross-validation chooses which of the two is at work, and its size: plans of one depth give the cost of hops,
and predict the other depth of the same plans. A law is chosen on some families and validated on others; with
one family, it is chosen on some of its plans and validated on the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from controlplane.baselines.estimators import latency_fit
from controlplane.baselines.estimators.latency_fit import ONE_LAYER, LatencyFit, LayerWork
from controlplane.baselines.estimators.tables import Point
from controlplane.baselines.estimators.types import Family, Query

Array = NDArray[np.float64]

FLOORS = 24  # values between half of a fast layer and five times the slowest
WAITS = tuple(np.linspace(0, 1, 11)[1:].tolist())
REFINEMENTS = (0.03, 0.01, 0.003)  # relative steps of a floor, absolute ones of a wait
FOLDS = 5
WORTH = 0.95  # a law with more constants must have less than this share of the error of a simpler one
MAX_ERROR = 0.5  # of a single row, so that no row decides


@dataclass(frozen=True)
class StageLaw:
    """`floor_s`, `prepared_s`: seconds; `wait`: 0 to 1. `error`: mean relative error on other plans
    than those of the fit."""

    floor_s: float = 0.0
    wait: float = 0.0
    error: float = 0.0
    prepared_s: float = 0.0

    def layers(self, query: Query) -> Array:
        """[stages] layers that each stage computes or waits for."""
        stages = np.array(query.layers_per_stage, dtype=np.float64)
        return np.asarray((1 - self.wait) * stages + self.wait * stages.max())

    def work(self, query: Query, prompt_s: float, token_s: float) -> LayerWork:
        """The work of layers that take `prompt_s` for a prompt and `token_s` for a token. A single stage
        has no floor: there the host runs ahead."""
        layers, floor = self.layers(query), self.floor_s if query.pipeline_parallel > 1 else 0.0
        prompt, token = layers[layers * prompt_s >= floor], layers[layers * token_s >= floor]
        idle = len(layers) - len(prompt) + (query.output_tokens - 1) * (len(layers) - len(token))
        saved_s = self.saved_s(query, token_s)
        return LayerWork(float(prompt.sum()), float(token.sum()), floor * idle - saved_s)

    def saved_s(self, query: Query, token_s: float) -> float:
        """What stages save because their hosts prepare layers at the same time, over all passes."""
        together = query.layers - max(query.layers_per_stage)
        return min(self.prepared_s, token_s) * together * query.output_tokens


def choose(points_of: Mapping[Family, Sequence[Point]], alone: Mapping[Family, LatencyFit]) -> StageLaw:
    """The law of all families' pipelines. `alone`: fits to plans of one stage."""
    families = [f for f in (_pipelines(alone[k], points_of[k]) for k in sorted(alone)) if f is not None]
    if not families:
        return StageLaw()
    classes = _classes(families)
    errors = {law: _errors(families, law) for laws in classes for law in laws}
    chosen, least = StageLaw(), np.inf
    for laws in classes:
        held_out = _held_out(np.array([errors[law] for law in laws]))
        if held_out < WORTH * least:
            best = min(laws, key=lambda law: float(errors[law].mean()))
            chosen, least = replace(best, error=held_out), held_out
    return _refined(families, chosen)


def _errors(families: Sequence[_Pipelines], law: StageLaw) -> Array:
    """A law's errors by family, or by plan where there is only one family."""
    if len(families) > 1:
        return np.array([family.error(law) for family in families])
    (family,) = families
    off = family.errors(law)
    return np.array([off[family.plan == plan].mean() for plan in np.unique(family.plan)])


def _refined(families: Sequence[_Pipelines], law: StageLaw) -> StageLaw:
    """The law with the least error, refined between its neighbours on the grid."""
    for step in REFINEMENTS:
        nearby = [
            StageLaw(law.floor_s * (1 + step * up), wait, law.error)
            for up in range(-4, 5)
            for wait in {min(1.0, max(0.0, law.wait + step * right)) for right in range(-4, 5)}
            if law.wait or not wait
        ]
        law = min(nearby, key=lambda near: sum(family.error(near) for family in families))
    return law


def _classes(families: Sequence[_Pipelines]) -> list[list[StageLaw]]:
    """The laws to choose from, with fewer constants first."""
    token_s = np.concatenate([family.token_s for family in families])
    token_s = token_s[token_s > 0]  # noise hides some layers' times
    floors: list[float] = []
    if len(token_s):
        low, high = np.quantile(token_s, (0.05, 1.0))
        floors = np.geomspace(0.5 * low, 5 * high, FLOORS).tolist()
    classes = [
        [StageLaw()],
        [StageLaw(floor) for floor in floors],
        [StageLaw(0.0, wait) for wait in WAITS],
        [StageLaw(floor, wait) for floor in floors for wait in WAITS[1::2]],
    ]
    return [laws for laws in classes if laws]


def _held_out(errors: Array) -> float:
    """The average error of the best law of the other folds' parts, from `errors` [laws, parts]. A single
    part can validate nothing: return its error with the first law."""
    parts = errors.shape[1]
    if parts == 1:
        return float(errors[0, 0])
    folds = np.arange(parts) % min(FOLDS, parts)
    own = np.empty(parts)
    for fold in range(folds.max() + 1):
        inside = folds == fold
        own[inside] = errors[int(errors[:, ~inside].mean(axis=1).argmin()), inside]
    return float(own.mean())


@dataclass(frozen=True)
class _Pipelines:
    """Rows of one family's plans of several stages. Stages are padded with 0.

    Arrays by row, seconds: `seen`; `outside` of layers; `prompt_s` and `token_s` of one layer; `passes`
    after the prompt; `hops`; `deeper`: not of its plan's fewest layers; `plan`: a number for each TP and
    number of stages.
    """

    seen: Array
    outside: Array
    prompt_s: Array
    token_s: Array
    passes: Array
    hops: Array
    stages: Array  # [rows, most stages] layers
    deeper: NDArray[np.bool_]
    plan: NDArray[np.int_]

    def error(self, law: StageLaw) -> float:
        """The mean of `errors`."""
        return float(self.errors(law).mean())

    def errors(self, law: StageLaw) -> Array:
        """[rows] relative errors at each of two depths, with the hops of the other depth."""
        left = self.seen - self.outside - self._layers_s(law)
        rows = np.stack([self.hops, self.hops * self.passes], axis=1) / self.seen[:, None]
        left = left / self.seen
        off = np.empty(len(left))
        for half in (self.deeper, ~self.deeper):
            off[half] = left[half] - rows[half] @ _non_negative(rows[~half], left[~half])
        return np.asarray(np.minimum(np.abs(off), MAX_ERROR))

    def _layers_s(self, law: StageLaw) -> Array:
        longest = self.stages.max(axis=1, keepdims=True)
        waited = (1 - law.wait) * self.stages + law.wait * longest * (self.stages > 0)
        floor = law.floor_s * (self.stages > 0)
        prompt = np.maximum(floor, waited * self.prompt_s[:, None]).sum(axis=1)
        token = np.maximum(floor, waited * self.token_s[:, None]).sum(axis=1)
        return np.asarray(prompt + self.passes * token)


def _pipelines(fit: LatencyFit, points: Iterable[Point]) -> _Pipelines | None:
    """The rows of a family's pipelines. None without pipelines of two depths."""
    known = [
        p
        for p in points
        if p.query.pipeline_parallel > 1
        and p.query.tensor_parallel >= fit.widths[0]
        and p.query.batch == fit.law.reference
    ]
    fewest: dict[tuple[int, int], int] = {}
    for p in known:
        plan = (p.query.tensor_parallel, p.query.pipeline_parallel)
        fewest[plan] = min(fewest.get(plan, p.query.layers), p.query.layers)
    deeper = [p.query.layers > fewest[p.query.tensor_parallel, p.query.pipeline_parallel] for p in known]
    if not any(deeper) or all(deeper):
        return None
    rows, plans = [_row(fit, p.query) for p in known], sorted(fewest)
    prompt_s, token_s, outside = (np.array(column) for column in zip(*rows, strict=True))
    stages = np.zeros((len(known), max(p.query.pipeline_parallel for p in known)))
    for row, p in zip(stages, known, strict=True):
        row[: p.query.pipeline_parallel] = p.query.layers_per_stage
    return _Pipelines(
        np.array([p.latency_s for p in known]),
        outside,
        prompt_s,
        token_s,
        np.array([p.query.output_tokens - 1.0 for p in known]),
        np.array([p.query.pipeline_parallel - 1.0 for p in known]),
        stages,
        np.array(deeper),
        np.array([plans.index((p.query.tensor_parallel, p.query.pipeline_parallel)) for p in known]),
    )


def _row(fit: LatencyFit, query: Query) -> tuple[float, float, float]:
    """(a layer's prompt, its token, all work outside of layers except hops), s."""
    parts = np.maximum(0.0, latency_fit.form(fit, query.tensor_parallel, 1) @ fit.coefficients)
    prompt, token, overhead, first, step, *_ = parts * latency_fit.weights(
        fit.law, ONE_LAYER, query.output_tokens, query.batch
    )
    passes = max(1, query.output_tokens - 1)
    return float(prompt), float(token + overhead) / passes, float(first + step)


def _non_negative(rows: Array, left: Array) -> Array:
    """[2] least squares with both at least 0: the unbounded solution, or the better one with one value at
    0."""
    gram, right = rows.T @ rows, rows.T @ left
    determinant = gram[0, 0] * gram[1, 1] - gram[0, 1] ** 2
    if determinant > 1e-12 * gram[0, 0] * gram[1, 1]:
        both = np.linalg.solve(gram, right)
        if both.min() >= 0:
            return np.asarray(both)
    single = np.maximum(0.0, right / np.maximum(np.diag(gram), 1e-300))
    gain = 2 * single * right - single**2 * np.diag(gram)
    best = np.zeros(2)
    best[int(gain.argmax())] = single[int(gain.argmax())]
    return best


def layer_s(fit: LatencyFit, query: Query) -> tuple[float, float]:
    """One layer's seconds for the query's prompt and for one of its tokens."""
    prompt, token, _ = _row(fit, replace(query, output_tokens=max(2, query.output_tokens)))
    return prompt, token
