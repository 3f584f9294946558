"""The default estimator of tables: it uses every fingerprint, and physics for unmeasured configurations.

It is built in a few passes, each a pure function of the fingerprints. (1) Fit the plans of one stage, and
choose the stages' extra cost by cross-validation. The disagreement of rows is the noise. (2) Families share
the reading rate of weights and the time of a layer that is not reading, and together determine the prompts'
length. (3) Fit again with both, and with the
growth with the batch from the measured batches. (4) Fit each batch with that as its prior, as far as
cross-validation prefers it at large batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from controlplane.baselines.estimators import batch_fits, latency_fit, laws, memory_fit, pooling, stage_law
from controlplane.baselines.estimators.latency_fit import TPOT_LAYER, LatencyFit, Noise, Prior, Priors, Works
from controlplane.baselines.estimators.laws import BatchLaw
from controlplane.baselines.estimators.memory_fit import MemoryFit, memory_form
from controlplane.baselines.estimators.plan_form import PlanForm
from controlplane.baselines.estimators.stage_law import StageLaw
from controlplane.baselines.estimators.tables import Measurement, Point, by_family, points
from controlplane.baselines.estimators.types import Family, Interval, NotPredictable, Prediction, Query

Array = NDArray[np.float64]

PointsOf = dict[Family, tuple[Point, ...]]

NINETY_PERCENT = 1.645  # standard deviations of a normal error
SEQUENCE_SHARE = 0.004  # sampling one more sequence, relative to all work outside of layers
MESSAGE_SHARE = 1 / 64  # one more row in an all-reduce, relative to its start
UNKNOWN_KV = 2e-5  # a cached token relative to a layer's weights, without figures of memory
# The part of a layer's fixed time in which its host prepares it, which stages do at the same time: MaverIQ's
# table of uneven pipelines shows 0.03 ms of 0.06. The rest is launches, in every stage.
PREPARED = 0.5
OWN_GROWTH = 0.25  # deviation of a family's growth from that of all, relative to its deviation without them
PASSES = 2
NOISE_PASSES = 3  # outliers by one pass's noise may not be outliers by the next's


class Ostinato:
    name = "ostinato"

    def __init__(self, fingerprints: Iterable[Measurement]) -> None:
        points_of = by_family(points(fingerprints))
        self._why: dict[Family, str] = {}
        self._rates: Mapping[str, float] = {}
        self.fixed_s = 0.0
        self._overheads: Mapping[Family, Priors] = {}
        self._growth: pooling.Growth | None = None
        self._forms: dict[tuple[Family, int, int], PlanForm] = {}
        self.memory = _memories(points_of, pooling.USUAL_PROMPT)
        self.latency: dict[Family, LatencyFit] = {}
        self.stages, self.noise = self._pipelines(points_of)
        self.latency = self._fits(points_of)
        outside = pooling.outside_priors(list(self.latency.values()))
        self.latency = self._fits(points_of, outside=outside)
        layers = self._layers(pooling.USUAL_PROMPT)
        self._rates = pooling.reading_rates(layers, self.fixed_s)
        self.latency = self._fits(points_of, outside=outside)
        self.prompt_tokens = pooling.prompt_tokens(list(self.latency.values()))
        layers = self._layers(self.prompt_tokens)
        priors = pooling.layer_priors(layers)
        self._overheads = pooling.overhead_priors(list(self.latency.values()), _hidden(self.memory))
        self.latency = self._fits(points_of, self.prompt_tokens, priors, outside)
        self._growth = pooling.shared_growth(list(self.latency.values()))
        if self._growth is not None:
            self.latency = self._fits(points_of, self.prompt_tokens, priors, outside)
        self.memory_forms = {f: memory_form(f, rows, self.prompt_tokens) for f, rows in points_of.items()}
        self.misfits = pooling.misfit_by_batch(list(self.latency.values()), self.noise)
        self.by_batch = self._at_each_batch(points_of)

    def predict(self, query: Query) -> Prediction:
        fit = self.latency.get(query.family)
        if fit is None:
            raise NotPredictable(self._why.get(query.family, f"no fingerprints of {query.family}"))
        if query.tensor_parallel < fit.widths[0]:
            raise NotPredictable(f"no fingerprints of {query.family} at TP={query.tensor_parallel} or less")
        memory = self.memory_forms[query.family]
        return Prediction(
            self._latency(fit, query), None if memory is None else _interval(*memory.predict(query))
        )

    def _latency(self, fit: LatencyFit, query: Query) -> Interval:
        key = (query.family, query.tensor_parallel, query.pipeline_parallel)
        if key not in self._forms:
            plan = query.tensor_parallel, query.pipeline_parallel
            self._forms[key] = PlanForm(self.by_batch[query.family], fit, self.misfits, self.stages, *plan)
        return _interval(*self._forms[key].latency(query))

    def _pipelines(self, points_of: PointsOf) -> tuple[StageLaw, Noise]:
        """The extra cost of stages, and the scatter of rows of one and of several stages.

        Plans of one stage give the time of a layer; pipelines are compared with that. Their noise is the
        disagreement among them.
        """
        self.stages, self.noise = StageLaw(), Noise(pooling.NOISE, pooling.NOISE)
        single, several = _by_stages(points_of)
        self.latency = self._fits(single)
        self.stages = stage_law.choose(points_of, self.latency)
        for _ in range(NOISE_PASSES):
            noise = pooling.pooled_noise(list(self._fits(several or points_of).values()))
            self.noise = Noise(noise, noise)
        return self.stages, pooling.unexplained(noise, self.stages.error)

    def _fits(
        self,
        points_of: PointsOf,
        prompt_tokens: float | None = None,
        layers: Mapping[Family, Prior] = MappingProxyType({}),
        outside: Priors = MappingProxyType({}),
    ) -> dict[Family, LatencyFit]:
        fits: dict[Family, LatencyFit] = {}
        self._why.clear()
        for family, rows in points_of.items():
            priors, works = {**outside, **self._overheads.get(family, {})}, self._works(family, rows)
            if family in layers:
                priors[min(p.query.tensor_parallel for p in rows), TPOT_LAYER] = layers[family]
            try:
                law = self._law(family, rows, prompt_tokens or pooling.USUAL_PROMPT)
                settle = prompt_tokens is not None
                reach = 1.0 if self._growth is None else OWN_GROWTH
                fits[family] = _fit(
                    family, rows, self.noise, law, priors, works, reach=reach if settle else None
                )
            except NotPredictable as error:
                self._why[family] = str(error)
        return fits

    def _at_each_batch(self, points_of: PointsOf) -> dict[Family, tuple[LatencyFit, ...]]:
        """Fits at each measured batch, by family, as near to the fit of all batches as cross-validation
        chooses."""
        works = {family: self._works(family, points_of[family]) for family in self.latency}
        leeway = batch_fits.choose_leeway(self.latency, points_of, self.noise, works, self.misfits)
        return {
            family: batch_fits.own_fits(
                fit, points_of[family], self.noise, works[family], self.misfits, leeway
            )
            for family, fit in self.latency.items()
        }

    def _layers(self, prompt_tokens: float) -> list[pooling.Layer]:
        """The layers that were measured on one GPU. Sets the part of their time that is not reading."""
        layers = _layers(self.latency, self.memory, prompt_tokens)
        self.fixed_s = pooling.fixed_s(layers)
        self.stages = replace(self.stages, prepared_s=PREPARED * self.fixed_s)
        return layers

    def _works(self, family: Family, rows: Sequence[Point]) -> Works:
        """The cost of layers in each row's pipeline, by the last fit's figures."""
        fit = self.latency.get(family)
        if fit is None:
            return {}
        known = [p.query for p in rows if p.query.tensor_parallel >= fit.widths[0]]
        return {query: self.stages.work(query, *stage_law.layer_s(fit, query)) for query in known}

    def _law(self, family: Family, rows: Sequence[Point], prompt_tokens: float) -> BatchLaw:
        """The prior batch law: a roofline, with the bytes that memory implies."""
        reference = min(p.query.batch for p in rows)
        rate = self._rates.get(family.dtype, 1.0)
        share = rate * laws.compute_share(family.dtype)
        memory = self.memory.get(family)
        known = memory is not None and memory.layer_bytes > 0
        kv = rate * memory.kv_bytes / memory.layer_bytes if memory is not None and known else UNKNOWN_KV
        outputs = float(np.mean([p.query.output_tokens for p in rows if p.query.batch == reference]))
        prompt = laws.PROMPT_TOKEN * share * prompt_tokens
        growth = self._growth or pooling.Growth(SEQUENCE_SHARE, MESSAGE_SHARE)
        many = laws.MANY_ROWS.get(family.dtype, 1.0)
        own = (growth.sequence, growth.message, many)
        return BatchLaw(reference, share, prompt, kv, *own, prompt_tokens, outputs, self._fixed(family))

    def _fixed(self, family: Family) -> float:
        """BatchLaw.fixed of the last fit."""
        fit = self.latency.get(family)
        if fit is None or not self.fixed_s:
            return 0.0
        return self.fixed_s / max(fit.tpot_layer()[0] - self.fixed_s, self.fixed_s)


def _fit(
    family: Family,
    rows: Sequence[Point],
    noise: Noise,
    law: BatchLaw,
    priors: Priors,
    works: Works,
    reach: float | None,
) -> LatencyFit:
    """A fit to the smallest batch; with `reach`, then to all batches, with a law fitted to them."""
    alone = [p for p in rows if p.query.batch == law.reference]
    if not latency_fit.sufficient(alone):
        alone = list(rows)
    fit = latency_fit.fit_latency(family, alone, noise, law, priors, works)
    if reach is None:
        return fit
    start = law
    for _ in range(PASSES if len(alone) < len(rows) else 1):
        expected = replace(start, prompt=pooling.prompt_share(replace(fit, law=start), law.prompt_tokens))
        law = latency_fit.refine(replace(fit, law=expected), rows, works, reach)
        fit = latency_fit.fit_latency(family, rows, noise, law, priors, works)
    return fit


def _by_stages(points_of: PointsOf) -> tuple[PointsOf, PointsOf]:
    """Rows of one stage, and of several stages; families without rows are left out."""
    single = {f: tuple(p for p in rows if p.query.pipeline_parallel == 1) for f, rows in points_of.items()}
    several = {f: tuple(p for p in rows if p.query.pipeline_parallel > 1) for f, rows in points_of.items()}
    return {f: rows for f, rows in single.items() if rows}, {f: rows for f, rows in several.items() if rows}


def _layers(
    fits: dict[Family, LatencyFit], memory: dict[Family, MemoryFit], prompt_tokens: float
) -> list[pooling.Layer]:
    """The layers that were measured on one GPU: bytes over bandwidth."""
    return [
        pooling.Layer(
            family,
            memory[family].layer_bytes,
            *fit.tpot_layer(),
            memory[family].kv_bytes * (prompt_tokens + fit.law.output_tokens / 2),
        )
        for family, fit in fits.items()
        if family in memory and fit.widths[0] == 1 and memory[family].layer_bytes > 0
    ]


def _hidden(memory: Mapping[Family, MemoryFit]) -> dict[Family, float]:
    """The width of hidden states in an arbitrary unit: a layer's values grow with its square."""
    layers = {f: fit.layer_bytes / laws.weight_bytes_per_value(f.dtype) for f, fit in memory.items()}
    return {family: values**0.5 for family, values in layers.items() if values > 0}


def _memories(points_of: PointsOf, prompt_tokens: float) -> dict[Family, MemoryFit]:
    fits = {family: memory_fit.fit_memory(family, rows, prompt_tokens) for family, rows in points_of.items()}
    return {family: fit for family, fit in fits.items() if fit is not None}


def _interval(value: float, deviation: float) -> Interval:
    reach = NINETY_PERCENT * deviation
    return Interval(value, max(0.0, value - reach), value + reach)
