"""New constants for MaverIQ's equation 2, from measured full models.

The paper's loss is the mean absolute percentage error; it has kinks and several minima. So Nelder-Mead, which
needs no gradient, descends from several fixed starts inside bounds, and the best result counts. The same
input gives the same constants.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from controlplane.baselines.estimators.maveriq import EXPONENTS, Exponents, MaverIQ, PipelineTerm
from controlplane.baselines.estimators.tables import Measurement, points
from controlplane.baselines.estimators.types import NotPredictable

BOUNDS = ((0.0, 1.0), (0.0, 3.0), (0.0, 3.0), (0.0, 3.0))
# The published constants; the start of the artifact's own descent; corners that are far from both.
STARTS = (
    (0.0491, 0.6858, 0.1877, 0.5686),
    (0.05, 0.75, 0.5, 0.1),
    (0.2, 1.0, 1.0, 1.0),
    (0.01, 0.3, 1.5, 0.3),
    (0.4, 1.5, 0.1, 1.5),
)

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """A measured plan of a full model, with the figures equation 2 needs; seconds."""

    tensor_parallel: int
    pipeline_parallel: int
    reference: float
    tp_overhead: float
    second_stage: float
    latency_s: float


def fit(samples: Sequence[Sample], starts: Sequence[Sequence[float]] = STARTS) -> Exponents:
    """The constants with the least mean absolute percentage error. Raises ValueError without samples."""
    if not samples:
        raise ValueError("expected at least one measured plan to fit constants to")
    columns = np.array(
        [
            (s.tensor_parallel, s.pipeline_parallel, s.reference, s.tp_overhead, s.second_stage, s.latency_s)
            for s in samples
        ],
        dtype=np.float64,
    ).T
    descents = [_descend(start, columns) for start in starts]
    best = min(descents, key=lambda descent: descent[0])
    again = _descend(best[1], columns)  # from the point where the first descent's simplex collapsed
    return Exponents(*(float(value) for value in min(best, again, key=lambda descent: descent[0])[1]))


def _descend(start: Sequence[float], columns: Array) -> tuple[float, list[float]]:
    """One descent: (loss, constants)."""
    options = {"maxiter": 1500, "xatol": 1e-5, "fatol": 1e-8}
    result = minimize(
        _loss, np.array(start), args=(columns,), method="Nelder-Mead", bounds=BOUNDS, options=options
    )
    return float(result.fun), [float(value) for value in result.x]


def fit_formats(
    fingerprints: Iterable[Measurement],
    truth: Iterable[Measurement],
    term: PipelineTerm = PipelineTerm.CODE,
) -> dict[tuple[str, bool], Exponents]:
    """Constants by (dtype, INT8 KV cache), from the truth rows of batch 1 that fingerprints reach."""
    estimator = MaverIQ(fingerprints, pipeline_term=term)
    samples: dict[tuple[str, bool], list[Sample]] = {}
    for point in points(truth):
        query = point.query
        if query.batch != 1:
            continue
        try:
            figures = estimator.references(query, 1, term)
        except NotPredictable:
            continue
        sample = Sample(query.tensor_parallel, query.pipeline_parallel, *figures, point.latency_s)
        samples.setdefault((query.family.dtype, query.family.int8_kv), []).append(sample)
    return {**EXPONENTS, **{format_: fit(of_format) for format_, of_format in samples.items()}}


def _loss(constants: Array, columns: Array) -> float:
    alpha, beta, gamma, delta = constants
    tp, pp, reference, tp_overhead, second_stage, latency = columns
    pp_overhead = np.maximum(0.0, second_stage - reference / 2.0**alpha)
    shared = np.maximum(0.0, reference) / (tp * pp**alpha)
    # 0^0 is 1, but a single rank has no overhead for any exponent.
    allreduce = np.where(tp > 1, (tp - 1) ** beta, 0.0) / pp**gamma * np.maximum(0.0, tp_overhead)
    hops = np.where(pp > 1, (pp - 1) ** delta, 0.0) * pp_overhead
    return float(np.mean(np.abs(shared + allreduce + hops - latency) / latency))
