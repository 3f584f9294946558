"""Hardware constants from the truth of other models: the paper's one-time cost. Never from a model's own
rows.

`maveriq`: the exponents of equation 2, fitted again (maveriq_fit). `ostinato`: a ridge regression of the
remaining logarithm of (measured / predicted) on the number format, TP, PP and batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from controlplane.baselines.estimators.maveriq import MaverIQ
from controlplane.baselines.estimators.maveriq_fit import fit_formats
from controlplane.baselines.estimators.ostinato import Ostinato
from controlplane.baselines.estimators.tables import Measurement, Point, points
from controlplane.baselines.estimators.types import (
    Interval,
    NotPredictable,
    Prediction,
    Query,
    TableEstimator,
)

Array = NDArray[np.float64]

FEATURE_SPREAD = 0.1  # the prior spread of the effect of a format or a doubling
ROW_SPREAD = 0.05  # scatter of single rows
OUTLIER = 3.0


@dataclass(frozen=True)
class Correction:
    """A factor exp(features @ slopes) for a latency or a memory; `formats` are the formats of the fitted
    rows."""

    formats: tuple[str, ...]
    slopes: Array

    def factor(self, query: Query) -> float:
        return float(np.exp(_features(query, self.formats) @ self.slopes))


@dataclass(frozen=True)
class Corrected:
    """An estimator with corrected figures; its intervals keep their relative width."""

    base: TableEstimator
    latency: Correction
    memory: Correction
    name: str = "ostinato, calibrated on other models"

    def predict(self, query: Query) -> Prediction:
        plain = self.base.predict(query)
        memory = plain.memory_bytes
        return Prediction(
            _scaled(plain.latency_s, self.latency.factor(query)),
            None if memory is None else _scaled(memory, self.memory.factor(query)),
        )


@dataclass(frozen=True)
class LeaveOneModelOut:
    """Estimators by model, each calibrated without its model. Models without others stay uncalibrated."""

    base: TableEstimator
    by_model: dict[str, TableEstimator]

    @property
    def name(self) -> str:
        return f"{self.base.name}, calibrated on the measured plans of the other models"

    def predict(self, query: Query) -> Prediction:
        return self.by_model.get(query.family.model, self.base).predict(query)


def calibrated_maveriq(fingerprints: Sequence[Measurement], truth: Sequence[Measurement]) -> LeaveOneModelOut:
    def without(others: Sequence[Measurement]) -> TableEstimator:
        return MaverIQ(fingerprints, exponents=fit_formats(fingerprints, others))

    return LeaveOneModelOut(MaverIQ(fingerprints), _each_without(truth, without))


def calibrated_ostinato(
    fingerprints: Sequence[Measurement], truth: Sequence[Measurement]
) -> LeaveOneModelOut:
    base = Ostinato(fingerprints)

    def without(others: Sequence[Measurement]) -> TableEstimator:
        return correct(base, points(others))

    return LeaveOneModelOut(base, _each_without(truth, without))


def correct(base: TableEstimator, truth: Iterable[Point]) -> Corrected:
    """`base`, corrected by its errors on `truth`, as far as these depend on format, TP, PP and batch."""
    latency: list[tuple[Query, float]] = []
    memory: list[tuple[Query, float]] = []
    for point in truth:
        try:
            predicted = base.predict(point.query)
        except NotPredictable:
            continue
        latency.append((point.query, _log_ratio(point.latency_s, predicted.latency_s)))
        if point.memory_bytes is not None and predicted.memory_bytes is not None:
            memory.append((point.query, _log_ratio(point.memory_bytes, predicted.memory_bytes)))
    return Corrected(base, _regress(latency), _regress(memory))


def _each_without(
    truth: Sequence[Measurement], build: Callable[[Sequence[Measurement]], TableEstimator]
) -> dict[str, TableEstimator]:
    estimators = {}
    for model in sorted({row.query.family.model for row in truth}):
        others = [row for row in truth if row.query.family.model != model]
        if others:
            estimators[model] = build(others)
    return estimators


def _log_ratio(actual: float, predicted: Interval) -> float:
    return float(np.log(actual / predicted.value)) if predicted.value > 0 else 0.0


def _features(query: Query, formats: Sequence[str]) -> Array:
    tp, pp, batch = (float(np.log2(n)) for n in (query.tensor_parallel, query.pipeline_parallel, query.batch))
    few_bits = float(not query.family.dtype.endswith("float16"))
    common = [
        1.0,
        tp,
        tp * tp,
        pp,
        tp * pp,
        batch,
        batch * batch,
        batch * few_bits,
        batch * tp,
        pp * few_bits,
    ]
    return np.array([*common, *(float(query.family.format == name) for name in formats)])


def _regress(rows: Sequence[tuple[Query, float]]) -> Correction:
    """Ridge regression with outliers weighted down; without rows, a factor of 1."""
    formats = tuple(sorted({query.family.format for query, _ in rows}))
    if not rows:
        return Correction((), np.zeros(10))
    design = np.array([_features(query, formats) for query, _ in rows])
    size = np.maximum(1.0, np.abs(design).max(axis=0))  # squares of logarithms are large
    off = np.array([ratio for _, ratio in rows])
    weight = np.ones(len(off))
    ridge = np.eye(design.shape[1]) * (ROW_SPREAD / FEATURE_SPREAD) ** 2
    scaled = design / size
    for _ in range(4):
        slopes = np.linalg.solve(scaled.T @ (scaled * weight[:, None]) + ridge, scaled.T @ (weight * off))
        residual = np.abs(off - scaled @ slopes)
        weight = np.minimum(1.0, OUTLIER * ROW_SPREAD / np.maximum(residual, 1e-12))
    return Correction(formats, slopes / size)


def _scaled(interval: Interval, factor: float) -> Interval:
    return replace(
        interval, value=interval.value * factor, low=interval.low * factor, high=interval.high * factor
    )
