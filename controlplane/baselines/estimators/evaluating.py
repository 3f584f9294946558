"""The agreement of an estimator's predictions from fingerprints with the truth, row by row.

Truth enters only here, after the estimator was built. Only an explicit calibration sees truth, and never that
of the model it predicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from controlplane.baselines.estimators.calibrating import calibrated_maveriq, calibrated_ostinato
from controlplane.baselines.estimators.maveriq import MaverIQ
from controlplane.baselines.estimators.ostinato import Ostinato
from controlplane.baselines.estimators.tables import Point, Table, points
from controlplane.baselines.estimators.types import (
    Calibration,
    EstimatorName,
    NotPredictable,
    Prediction,
    Query,
    TableEstimator,
)


@dataclass(frozen=True)
class Compared:
    """A truth row with its prediction, or the reason why there is none."""

    truth: Point
    prediction: Prediction | None
    reason: str = ""


@dataclass(frozen=True)
class Errors:
    """Absolute errors as shares of the truth; `covered`: share of truths inside their interval."""

    rows: int
    median: float
    p90: float
    covered: float


@dataclass(frozen=True)
class Group:
    """Rows that share a model, batch size or number format; `latency` or `memory` is None without rows."""

    by: str
    value: str
    rows: int
    predicted: int
    latency: Errors | None
    memory: Errors | None


@dataclass(frozen=True)
class Report:
    """`groups`: overall first. `reasons`: why rows were not predicted; `failures`: rows without figures."""

    estimator: str
    calibration: Calibration
    groups: tuple[Group, ...]
    reasons: dict[str, int]
    fingerprints: int
    fingerprint_failures: dict[str, int]
    truth_failures: dict[str, int]

    @property
    def overall(self) -> Group:
        return self.groups[0]


def build(
    fingerprints: Table, truth: Table, name: EstimatorName, calibration: Calibration = Calibration.NONE
) -> TableEstimator:
    """Build the estimator. Only a calibration reads `truth`."""
    if calibration is Calibration.NONE:
        return MaverIQ(fingerprints.rows) if name is EstimatorName.MAVERIQ else Ostinato(fingerprints.rows)
    fitted = calibrated_maveriq if name is EstimatorName.MAVERIQ else calibrated_ostinato
    return fitted(fingerprints.rows, truth.rows)


def evaluate(
    fingerprints: Table, truth: Table, name: EstimatorName, calibration: Calibration = Calibration.NONE
) -> Report:
    estimator = build(fingerprints, truth, name, calibration)
    compared = compare(estimator, truth)
    return Report(
        estimator.name,
        calibration,
        tuple(_groups(compared)),
        dict(sorted(Counter(c.reason for c in compared if c.prediction is None).items())),
        len(fingerprints.rows),
        fingerprints.failure_counts(),
        truth.failure_counts(),
    )


def compare(estimator: TableEstimator, truth: Table) -> tuple[Compared, ...]:
    """One entry per measured plan, its replicates by their median."""
    return tuple(_compare(estimator, point) for point in points(truth.rows))


def _compare(estimator: TableEstimator, point: Point) -> Compared:
    try:
        return Compared(point, estimator.predict(point.query))
    except NotPredictable as error:
        return Compared(point, None, str(error))


def _groups(compared: Sequence[Compared]) -> list[Group]:
    keys: tuple[tuple[str, Callable[[Query], str | int]], ...] = (
        ("model", lambda query: query.family.model),
        ("batch", lambda query: query.batch),
        ("format", lambda query: query.family.format),
    )
    groups = [_group("overall", "", compared)]
    for by, key in keys:
        values = {key(c.truth.query) for c in compared}
        for value in sorted(values, key=lambda v: (isinstance(v, str), v)):
            groups.append(_group(by, str(value), [c for c in compared if key(c.truth.query) == value]))
    return groups


def _group(by: str, value: str, compared: Sequence[Compared]) -> Group:
    latency, memory = [], []
    for c in compared:
        if c.prediction is None:
            continue
        latency.append((c.truth.latency_s, c.prediction.latency_s))
        if c.truth.memory_bytes is not None and c.prediction.memory_bytes is not None:
            memory.append((c.truth.memory_bytes, c.prediction.memory_bytes))
    errors = [
        Errors(
            len(pairs),
            float(np.median([abs(p.value / actual - 1) for actual, p in pairs])),
            float(np.quantile([abs(p.value / actual - 1) for actual, p in pairs], 0.9)),
            float(np.mean([p.holds(actual) for actual, p in pairs])),
        )
        if pairs
        else None
        for pairs in (latency, memory)
    ]
    return Group(by, value, len(compared), len(latency), *errors)
