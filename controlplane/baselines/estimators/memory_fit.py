"""Memory of one family, from its fingerprints.

    M = c + (TP-1) A + (PP-1) P + (TP-1) (PP-1) X            once: context, embedding, head, buffers
      + (B-b) [c' + (TP-1) A' + (PP-1) P' + (TP-1) (PP-1) X']    workspaces that grow with the batch
      + n [W + (TP-1) R + B (s+o) kv + (B-b) K]              per layer: weights, copies of norms, cache
      + d(TP,PP)                                             the extra of a measured plan

  + PP TP (TP-1) pair                                      buffers of each rank for each other of its stage

b: the smallest measured batch, s: prompt tokens, kv: cache bytes per token (known for known models, else
guessed from the layer), K: a sequence's bytes in addition to its cache. A and P are MaverIQ's A and A_p.
MaverIQ uses P for X. A further rank of any stage copies what A copies, except the embedding; so X lies
between the two here if no plan shows it, and X' is A'. `pair` is known where tables report what a run adds
(Memory-Pre-Run): an engine makes these buffers with its first all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import lsq_linear

from controlplane.baselines.estimators.laws import kv_bytes
from controlplane.baselines.estimators.tables import Point
from controlplane.baselines.estimators.types import Family, Query

Array = NDArray[np.float64]

MIB = 2**20
PAGE_BYTES = 4 * MIB  # an allocator's rounding, as noise of one rank's figure
PLAN_SHARE = 0.05  # deviation of a plan's own overhead from the law, as a share of its fixed part
WEIGHTS = 8  # the column of W
LAW_PARTS = 11  # columns before the columns of measured plans


@dataclass(frozen=True)
class Belief:
    """A prior on a combination of coefficients (factor by column): its expected value and standard
    deviation; bytes."""

    parts: Mapping[int, float]
    value: float
    deviation: float


@dataclass(frozen=True)
class MemoryFit:
    """A fit of memory. `plans` are the measured (TP, PP), with one coefficient each after the law's;
    bytes."""

    family: Family
    plans: tuple[tuple[int, int], ...]
    batches: tuple[int, ...]
    prompt_tokens: float
    kv_bytes: float
    pair_bytes: float
    coefficients: Array
    covariance: Array

    @property
    def layer_bytes(self) -> float:
        """One layer's weights over all ranks of TP = 1."""
        return float(self.coefficients[WEIGHTS])

    def predict(self, query: Query) -> tuple[float, float]:
        """The predicted (bytes over all GPUs, standard deviation)."""
        row = _row(query, self.plans, self.batches[0], self.prompt_tokens)
        known = _cache(query, self.prompt_tokens) * self.kv_bytes + _pairs(query) * self.pair_bytes
        value = max(0.0, float(row @ self.coefficients) + known)
        variance = float(row @ self.covariance @ row)
        measured = (query.tensor_parallel, query.pipeline_parallel) in self.plans
        beyond = max(0.0, np.log2(query.batch / self.batches[-1]))
        share = (0.018 if measured else 0.04) + 0.02 * float(beyond)
        return value, float(np.sqrt(max(0.0, variance) + (share * value) ** 2))


@dataclass(frozen=True)
class MemoryForm:
    """Memory at any batch: `whole` is fitted to all batches, `own` to each batch if several were measured.

    At a measured batch its own fit counts: an allocator's reserve does not grow linearly with the batch.
    """

    whole: MemoryFit
    own: Mapping[int, MemoryFit]

    def predict(self, query: Query) -> tuple[float, float]:
        """The predicted (bytes over all GPUs, standard deviation). Never less than at a smaller measured
        batch."""
        value, deviation = self.whole.predict(query)
        unmeasured = deviation / max(1.0, value)  # includes the batch's distance from the measured ones
        smaller = [batch for batch in self.own if batch <= query.batch]
        if not smaller:
            return value, deviation
        near = replace(query, batch=max(smaller))
        measured, deviation = self.own[near.batch].predict(near)
        grown = value / max(1.0, self.whole.predict(near)[0])
        least = max(self._at(query, batch) for batch in smaller)
        value = max(least, measured * max(1.0, grown))
        above = min((batch for batch in self.own if batch > query.batch), default=None)
        if above is not None:
            value = min(value, max(least, self._at(query, above)))
        return value, max(deviation * max(1.0, grown), unmeasured * value)

    def _at(self, query: Query, batch: int) -> float:
        return self.own[batch].predict(replace(query, batch=batch))[0]


def memory_form(family: Family, points: Sequence[Point], prompt_tokens: float) -> MemoryForm | None:
    """None without memory figures of at least two depths."""
    whole = fit_memory(family, points, prompt_tokens)
    if whole is None:
        return None
    own = {}
    for batch in whole.batches if len(whole.batches) > 1 else ():
        fit = fit_memory(family, [p for p in points if p.query.batch == batch], prompt_tokens)
        if fit is not None and fit.plans == whole.plans:
            own[batch] = fit
    return MemoryForm(whole, own)


def fit_memory(family: Family, points: Sequence[Point], prompt_tokens: float) -> MemoryFit | None:
    """None without memory figures of at least two depths."""
    measured = [p for p in points if p.memory_bytes is not None]
    if len({p.query.layers for p in measured}) < 2:
        return None
    plans = tuple(sorted({(p.query.tensor_parallel, p.query.pipeline_parallel) for p in measured}))
    batches = tuple(sorted({p.query.batch for p in measured}))
    design = np.array([_row(p.query, plans, batches[0], prompt_tokens) for p in measured])
    seen = np.array([p.memory_bytes for p in measured], dtype=np.float64)
    noise = np.array([PAGE_BYTES * p.query.ranks**0.5 for p in measured]) + 0.0005 * seen
    pair, kv = pair_bytes(measured), 0.0
    pairs = np.array([_pairs(p.query) for p in measured]) * pair
    for _ in range(2):  # the cache's guess needs the layer's bytes, which need the guess
        cache = np.array([_cache(p.query, prompt_tokens) for p in measured]) * kv
        beliefs = _priors(plans, seen, kv, prompt_tokens)
        coefficients, covariance = _solve(design, seen - cache - pairs, noise, beliefs, -kv * prompt_tokens)
        kv = kv_bytes(family.model, family.dtype, family.int8_kv, max(1.0, float(coefficients[WEIGHTS])))
    return MemoryFit(family, plans, batches, prompt_tokens, kv, pair, coefficients, covariance)


def _row(query: Query, plans: Sequence[tuple[int, int]], reference: int, prompt_tokens: float) -> Array:
    tp, pp, n = query.tensor_parallel, query.pipeline_parallel, query.layers
    more = max(0, query.batch - reference)
    law = [1.0, tp - 1.0, pp - 1.0, (tp - 1.0) * (pp - 1.0)]
    own = [float((tp, pp) == plan) for plan in plans]
    grown = [more * part for part in law]
    return np.array([*law, *grown, float(n), n * (tp - 1.0), float(n * more), *own])


def pair_bytes(points: Sequence[Point]) -> float:
    """A rank's bytes for each other rank of its stage: the memory that runs add, beyond that on one rank."""
    runs = [
        (p.query, p.run_bytes) for p in points if p.run_bytes is not None and p.query.pipeline_parallel == 1
    ]
    alone = [run for query, run in runs if query.tensor_parallel == 1]
    shared = [(query.tensor_parallel, run) for query, run in runs if query.tensor_parallel > 1]
    if not alone or not shared:
        return 0.0
    pairs = [(run - tp * median(alone)) / (tp * (tp - 1)) for tp, run in shared]
    return max(0.0, median(pairs))


def _pairs(query: Query) -> int:
    return query.pipeline_parallel * query.tensor_parallel * (query.tensor_parallel - 1)


def _cache(query: Query, prompt_tokens: float) -> float:
    """The number of token-layers in the cache."""
    return query.layers * query.batch * (prompt_tokens + query.output_tokens)


def _priors(plans: Sequence[tuple[int, int]], seen: Array, kv: float, prompt_tokens: float) -> list[Belief]:
    """Priors for figures that the rows may not determine."""
    small = float(seen.min())
    overhead = [Belief({at: 1.0}, 0.3 * small, 0.3 * small) for at in (1, 2)]
    growth = [Belief({at: 1.0}, 0.02 * small, 0.1 * small) for at in (4, 5, 6)]
    both = [
        Belief({3: 1.0, 1: -0.5, 2: -0.5}, 0.0, 0.05 * small),
        Belief({7: 1.0, 5: -1.0}, 0.0, 0.01 * small),
    ]
    layers = [Belief({9: 1.0}, 0.0, 0.002 * small), Belief({10: 1.0}, 0.0, kv * prompt_tokens + 1.0)]
    own = [
        Belief({LAW_PARTS + i: 1.0}, 0.0, PLAN_SHARE * small * (tp * pp) ** 0.5 + MIB)
        for i, (tp, pp) in enumerate(plans)
    ]
    return overhead + growth + both + layers + own


def _solve(
    design: Array, seen: Array, noise: Array, beliefs: Sequence[Belief], min_cache: float
) -> tuple[Array, Array]:
    """Bounded least squares with scaled columns. A sequence's cache stays above 0."""
    extra = np.zeros((len(beliefs), design.shape[1]))
    for i, belief in enumerate(beliefs):
        for column, factor in belief.parts.items():
            extra[i, column] = factor
    wide = np.vstack([design, extra])
    sd = np.concatenate([noise, [belief.deviation for belief in beliefs]])
    target = np.concatenate([seen, [belief.value for belief in beliefs]]) / sd
    a = wide / sd[:, None]
    size = np.maximum(np.linalg.norm(a, axis=0), 1e-300)
    lower = np.zeros(design.shape[1])
    lower[LAW_PARTS:] = -np.inf
    lower[LAW_PARTS - 1] = min_cache * size[LAW_PARTS - 1] - 1e-9
    solution = lsq_linear(a / size, target, bounds=(lower, np.inf), method="bvls")
    inverse = np.linalg.pinv((a / size).T @ (a / size))
    return solution.x / size, inverse / size[:, None] / size[None, :]
