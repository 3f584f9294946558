"""Fits to one measured batch each, and the choice between these and the one fit to all batches. Pure.

A batch's own figures need no law of the batch. But they rest on a few rows, and a full model has many more
layers than these rows. So cross-validation chooses how far they may leave the fit to all batches, at large
batches, where it matters. It predicts rows of the deeper fingerprints from the shallower ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from controlplane.baselines.estimators import latency_fit
from controlplane.baselines.estimators.latency_fit import LatencyFit, Noise, Works
from controlplane.baselines.estimators.tables import Point
from controlplane.baselines.estimators.types import Family, NotPredictable

# The leeway of a batch's own figures around those of all batches: a share, plus a multiple of the errors of
# the batch's rows. 0: the figures of all batches.
MIN_OWN = 0.05
LEEWAYS = (20.0, 1.0, 0.0)
WORTH = 0.9  # less leeway must reduce the error below this share
MAX_ERROR = 0.5  # of a single row, so that no row decides


def own_fits(
    fit: LatencyFit,
    rows: Sequence[Point],
    noise: Noise,
    works: Works,
    misfits: Mapping[int, float],
    leeway: float,
) -> tuple[LatencyFit, ...]:
    """A fit at each of a family's measured batches, near the fit to all batches."""
    fits = []
    for batch in fit.batches:
        alone = [p for p in rows if p.query.batch == batch]
        near = latency_fit.at_batch(fit, alone)
        if leeway and len(fit.batches) > 1 and latency_fit.sufficient(alone):
            priors = latency_fit.figures_near(near, leeway * misfits.get(batch, 0.0) + MIN_OWN)
            own = latency_fit.fit_latency(fit.family, alone, noise, near.law, priors, works)
            near = replace(own, plans=fit.plans) if own.widths == fit.widths else near
        fits.append(near)
    return tuple(fits)


def choose_leeway(
    fits: Mapping[Family, LatencyFit],
    points_of: Mapping[Family, Sequence[Point]],
    noise: Noise,
    works: Mapping[Family, Works],
    misfits: Mapping[int, float],
) -> float:
    """The first of LEEWAYS, or a later one with a smaller error at large batches."""
    chosen, least = LEEWAYS[0], np.inf
    for leeway in LEEWAYS:
        off = [
            error
            for family, fit in fits.items()
            for error in _held_out(fit, points_of[family], noise, works[family], misfits, leeway)
        ]
        error = float(np.mean(off)) if off else np.inf
        if error < WORTH * least:
            chosen, least = leeway, error
    return chosen


def _held_out(
    fit: LatencyFit,
    rows: Sequence[Point],
    noise: Noise,
    works: Works,
    misfits: Mapping[int, float],
    leeway: float,
) -> Iterator[float]:
    """Relative errors of the deeper rows at the larger half of the batches, predicted from the others."""
    depths = sorted({p.query.layers for p in rows})
    deeper = {depth for depth in depths[2:] if depth >= np.median(depths)}
    shallow = [p for p in rows if p.query.layers not in deeper]
    large = fit.batches[(len(fit.batches) + 1) // 2 :]
    if not deeper or not large:
        return
    try:
        known = latency_fit.fit_latency(fit.family, shallow, noise, fit.law, {}, works)
    except NotPredictable:
        return
    by_batch = {one.law.reference: one for one in own_fits(known, shallow, noise, works, misfits, leeway)}
    for point in rows:
        query = point.query
        one = by_batch.get(query.batch)
        if query.layers in deeper and query.batch in large and one and query.tensor_parallel in one.widths:
            predicted_s = latency_fit.predicted_s(one, query, works)
            yield min(MAX_ERROR, abs(predicted_s / point.latency_s - 1))
