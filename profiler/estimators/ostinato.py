"""The default estimator of tables: every fingerprint counts, and what was not measured follows physics.

Built in a few passes, each a pure function of the fingerprints: (1) fit each family; what its rows disagree
by is the noise; (2) families tell each other how fast weights are read, and together how long the prompts
were; (3) fit again with both, and the growth with the batch from the batches that are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from profiler.estimators import latency_fit, laws, memory_fit, pooling
from profiler.estimators.latency_fit import TPOT_LAYER, LatencyFit, Prior, Priors
from profiler.estimators.laws import BatchLaw
from profiler.estimators.memory_fit import MemoryFit
from profiler.estimators.tables import Measurement, Point, by_family, points
from profiler.estimators.types import Family, Interval, NotPredictable, Prediction, Query

Array = NDArray[np.float64]

NINETY_PERCENT = 1.645  # standard deviations of a normal error
SEQUENCE_SHARE = 0.004  # sampling one more sequence, over all that is outside of layers
MESSAGE_SHARE = 1 / 64  # one more row in an all-reduce, over its start
UNKNOWN_KV = 2e-5  # a cached token over a layer's weights, without figures of memory
PASSES = 2
# Errors of the laws, as standard deviations relative to a latency.
OF_FINGERPRINTS = 0.02  # a full model is not the sum of its layers to better than this
PER_WIDTH = 0.04  # per doubling of TP beyond what was measured
PER_STAGE = 0.01  # per doubling of stages beyond
PER_BATCH = 0.03  # per doubling of the batch beyond


class Ostinato:
    name = "ostinato"

    def __init__(self, fingerprints: Iterable[Measurement]) -> None:
        points_of = by_family(points(fingerprints))
        self._why: dict[Family, str] = {}
        self._shares: Mapping[str, float] = {}
        self.memory = _memories(points_of, pooling.USUAL_PROMPT)
        first = self._fits(points_of, pooling.NOISE, None, {}, {})
        self.noise = pooling.pooled_noise(list(first.values()))
        again = self._fits(points_of, self.noise, None, {}, {})
        outside = pooling.outside_priors(list(again.values()))
        again = self._fits(points_of, self.noise, None, {}, outside)
        layers = _layers(again, self.memory)
        self._shares = pooling.compute_shares(layers)
        again = self._fits(points_of, self.noise, None, {}, outside)
        self.prompt_tokens = pooling.prompt_tokens(list(again.values()))
        priors = pooling.layer_priors(layers)
        self.latency = self._fits(points_of, self.noise, self.prompt_tokens, priors, outside)
        self.memory = _memories(points_of, self.prompt_tokens)
        self._forms: dict[tuple[Family, int, int], _Form] = {}

    def predict(self, query: Query) -> Prediction:
        fit = self.latency.get(query.family)
        if fit is None:
            raise NotPredictable(self._why.get(query.family, f"no fingerprints of {query.family}"))
        if query.tensor_parallel < fit.widths[0]:
            raise NotPredictable(f"no fingerprints of {query.family} at TP={query.tensor_parallel} or less")
        memory = self.memory.get(query.family)
        return Prediction(
            self._latency(fit, query), None if memory is None else _interval(*memory.predict(query))
        )

    def _latency(self, fit: LatencyFit, query: Query) -> Interval:
        key = (query.family, query.tensor_parallel, query.pipeline_parallel)
        if key not in self._forms:
            self._forms[key] = _Form(fit, query.tensor_parallel, query.pipeline_parallel)
        return self._forms[key].latency(query)

    def _fits(
        self,
        points_of: dict[Family, tuple[Point, ...]],
        noise: float,
        prompt_tokens: float | None,
        layers: Mapping[Family, Prior],
        outside: Priors,
    ) -> dict[Family, LatencyFit]:
        fits = {}
        for family, rows in points_of.items():
            priors = dict(outside)
            if family in layers:
                priors[min(p.query.tensor_parallel for p in rows), TPOT_LAYER] = layers[family]
            try:
                law = self._law(family, rows, prompt_tokens or pooling.USUAL_PROMPT)
                fits[family] = _fit(family, rows, noise, law, priors, settle=prompt_tokens is not None)
            except NotPredictable as error:
                self._why[family] = str(error)
        return fits

    def _law(self, family: Family, rows: Sequence[Point], prompt_tokens: float) -> BatchLaw:
        """Before any batch was looked at: a roofline, with the bytes that memory implies."""
        reference = min(p.query.batch for p in rows)
        share = self._shares.get(family.dtype, laws.compute_share(family.dtype))
        memory = self.memory.get(family)
        known = memory is not None and memory.layer_bytes > 0
        kv = memory.kv_bytes / memory.layer_bytes if memory is not None and known else UNKNOWN_KV
        outputs = float(np.mean([p.query.output_tokens for p in rows if p.query.batch == reference]))
        prompt = share * prompt_tokens
        growth = (SEQUENCE_SHARE, MESSAGE_SHARE, laws.MANY_ROWS.get(family.dtype, 1.0))
        return BatchLaw(reference, share, prompt, kv, *growth, prompt_tokens, outputs)


class _Form:
    """Predictions of one plan: all that does not depend on layers, tokens and batch is done once."""

    def __init__(self, fit: LatencyFit, tp: int, pp: int) -> None:
        form = latency_fit.form(fit, tp, pp)
        self.law = fit.law
        self.parts = np.maximum(0.0, form @ fit.coefficients)
        self.covariance = form @ fit.covariance @ form.T
        by = laws.exponents(fit.family.dtype, fit.family.int8_kv)
        self.pipeline = laws.pipeline_factor(by, pp)
        self.batches = fit.batches[-1]
        near = min(abs(np.log2(tp / width)) for width in fit.widths)
        stages = 0.0 if (tp, pp) in fit.plans else float(np.log2(pp))
        self.law_error = float(
            OF_FINGERPRINTS**2
            + (PER_WIDTH * near) ** 2
            + (PER_STAGE * stages) ** 2
            + (abs(1 - self.pipeline) / 2) ** 2
        )

    def latency(self, query: Query) -> Interval:
        factors = latency_fit.weights(self.law, query.layers, query.output_tokens, query.batch, self.pipeline)
        value = float(factors @ self.parts)
        beyond = float(np.log2(max(1.0, query.batch / self.batches)))
        variance = float(factors @ self.covariance @ factors)
        variance += (self.law_error + (PER_BATCH * beyond) ** 2) * value**2
        return _interval(value, float(np.sqrt(max(0.0, variance))))


def _fit(
    family: Family, rows: Sequence[Point], noise: float, law: BatchLaw, priors: Priors, *, settle: bool
) -> LatencyFit:
    """A fit to the smallest batch alone. With `settle`, then a fit to all batches, with a batch law fitted to
    them."""
    alone = [p for p in rows if p.query.batch == law.reference]
    if not latency_fit.sufficient(alone):
        alone = list(rows)
    fit = latency_fit.fit_latency(family, alone, noise, law, priors)
    if not settle:
        return fit
    start = law
    for _ in range(PASSES if len(alone) < len(rows) else 1):
        expected = replace(start, prompt=pooling.prompt_share(replace(fit, law=start), law.prompt_tokens))
        law = latency_fit.refine(replace(fit, law=expected), rows)
        fit = latency_fit.fit_latency(family, rows, noise, law, priors)
    return fit


def _layers(fits: dict[Family, LatencyFit], memory: dict[Family, MemoryFit]) -> list[pooling.Layer]:
    """Only what was measured on one GPU: bytes over bandwidth."""
    return [
        pooling.Layer(family, memory[family].layer_bytes, *fit.tpot_layer())
        for family, fit in fits.items()
        if family in memory and fit.widths[0] == 1 and memory[family].layer_bytes > 0
    ]


def _memories(points_of: dict[Family, tuple[Point, ...]], prompt_tokens: float) -> dict[Family, MemoryFit]:
    fits = {family: memory_fit.fit_memory(family, rows, prompt_tokens) for family, rows in points_of.items()}
    return {family: fit for family, fit in fits.items() if fit is not None}


def _interval(value: float, deviation: float) -> Interval:
    reach = NINETY_PERCENT * deviation
    return Interval(value, max(0.0, value - reach), value + reach)
