"""The latency of one plan at any depth, output length and batch, from fits at the measured batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from controlplane.baselines.estimators import latency_fit
from controlplane.baselines.estimators.latency_fit import ONE_LAYER, LatencyFit
from controlplane.baselines.estimators.stage_law import StageLaw
from controlplane.baselines.estimators.types import Query

Array = NDArray[np.float64]

# Errors of the laws, as relative standard deviations of a latency. A full model is not the sum of its layers:
# MaverIQ's median error of 4.4% at batch 1 fits a normal error of this size.
OF_FINGERPRINTS = 0.065
PER_WIDTH = 0.04  # per doubling of TP beyond the measured TP
# Per doubling of both TP and the batch: unmeasured groups of ranks may have slower links, and an all-reduce's
# messages grow with the batch.
PER_WIDTH_AND_BATCH = 0.1
PER_STAGE = 0.01  # per doubling of stages beyond
PER_BATCH = 0.03  # per doubling of the batch from the smallest measured batch
# Factor of the errors of a batch's rows beyond their noise, because full models have many more layers; and
# its maximum.
PER_MISFIT, MAX_MISFIT = 5.0, 0.15


class PlanForm:
    """The precomputed parts of a plan that do not depend on layers, tokens and batch.

    `fits`: by batch, of one family. `of_all`: the fit to all batches, for larger batches than measured.
    `misfits`: by batch, see `pooling.misfit_by_batch`.
    """

    def __init__(
        self,
        fits: Sequence[LatencyFit],
        of_all: LatencyFit,
        misfits: Mapping[int, float],
        stages: StageLaw,
        tp: int,
        pp: int,
    ) -> None:
        forms = [latency_fit.form(fit, tp, pp) for fit in fits]
        self.fits, self.stages = fits, stages
        self.batches = np.array([fit.law.reference for fit in fits])
        self.misfits = [min(MAX_MISFIT, PER_MISFIT * misfits.get(fit.law.reference, 0.0)) for fit in fits]
        self.parts = [np.maximum(0.0, form @ fit.coefficients) for form, fit in zip(forms, fits, strict=True)]
        self.covariances = [form @ fit.covariance @ form.T for form, fit in zip(forms, fits, strict=True)]
        whole = latency_fit.form(of_all, tp, pp)
        self.of_all, self.whole = of_all, np.maximum(0.0, whole @ of_all.coefficients)
        near = min(abs(np.log2(tp / width)) for width in fits[0].widths)
        self.per_batch = float(PER_BATCH + PER_WIDTH_AND_BATCH * near)
        unmeasured = 0.0 if (tp, pp) in fits[0].plans else float(np.log2(pp))
        self.law_error = float(
            OF_FINGERPRINTS**2
            + (PER_WIDTH * near) ** 2
            + (PER_STAGE * unmeasured) ** 2
            + (stages.error if pp > 1 else 0.0) ** 2
        )

    def latency(self, query: Query) -> tuple[float, float]:
        """The predicted latency (s, standard deviation)."""
        at = max(0, int(np.searchsorted(self.batches, query.batch, side="right")) - 1)
        parts = self._parts(query, at)
        prompt, sharded, overhead = parts[:3]
        work = self.stages.work(query, prompt, sharded + overhead)
        passes = query.output_tokens - 1
        token = work.token * passes
        factors = np.array([work.prompt, token, token, 1.0, passes, 1.0, passes])
        value = float(factors @ parts) + work.constant_s
        own = self.parts[at]
        scaled = factors * np.where(own > 0, parts / np.where(own > 0, own, 1.0), 1.0)
        beyond = float(np.log2(max(1.0, query.batch / self.batches[0])))
        variance = float(scaled @ self.covariances[at] @ scaled)
        if len(query.layers_per_stage) > 1:  # a guessed part is saved
            variance += (self.stages.saved_s(query, sharded + overhead) / 2) ** 2
        variance += (self.law_error + self.misfits[at] ** 2 + (self.per_batch * beyond) ** 2) * value**2
        return value, float(np.sqrt(max(0.0, variance)))

    def _parts(self, query: Query, at: int) -> Array:
        """[7] parts of `latency_fit.form` at the query's batch and output length. They never fall with the
        batch: none is below that of a smaller measured batch, and none above that of the next larger one."""
        least = np.zeros(7)
        for i in range(at):
            least = np.maximum(least, self._grown(i, int(self.batches[i]), query.output_tokens))
        if query.batch > self.batches[-1]:
            most_measured = self._grown(at, int(self.batches[-1]), query.output_tokens)
            beyond = _grown(self.of_all, self.whole, query.batch, query.output_tokens)
            return np.asarray(np.maximum(np.maximum(least, most_measured), beyond))
        parts = np.maximum(least, self._grown(at, query.batch, query.output_tokens))
        if at + 1 < len(self.fits):
            most = self._grown(at + 1, int(self.batches[at + 1]), query.output_tokens)
            measured = np.maximum(least, self._grown(at, int(self.batches[at]), query.output_tokens))
            parts = np.minimum(parts, np.maximum(measured, most))
        return parts

    def _grown(self, at: int, batch: int, output_tokens: int) -> Array:
        return _grown(self.fits[at], self.parts[at], batch, output_tokens)


def _grown(fit: LatencyFit, parts: Array, batch: int, output_tokens: int) -> Array:
    """The parts of a fit at another batch, by its law."""
    growth = latency_fit.weights(fit.law, ONE_LAYER, 2, batch)
    growth[1] = fit.law.decode(batch, output_tokens)
    return np.asarray(parts * growth)
