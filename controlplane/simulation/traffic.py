"""The requests of a scenario: their arrivals, lengths, variants and promises.

For one seed, requests are the same for every policy and cluster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from controlplane.simulation.admitting import Terms, expected_tokens
from controlplane.simulation.forms import MAX_REQUESTS, Arrivals, ClassForm, LengthsForm, ScenarioForm
from controlplane.simulation.traces import Trace
from controlplane.simulation.world import new_asked
from controlplane.traffic.request_terms import RequestTerms
from controlplane.traffic.tenants import Tenant
from placement.solver.schema import ScenarioError

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
MS = 1e-3


@dataclass(frozen=True)
class Traffic:
    """`asked` [N] in the order of arrival; `classes` [N]: each request's class, by its place in the
    scenario."""

    asked: Any
    classes: Ints
    terms_of_classes: tuple[RequestTerms, ...]

    def terms(self) -> Terms:
        classes, of_classes = self.classes.tolist(), self.terms_of_classes
        prompts, expected = self.asked.prompt.tolist(), self.asked.expected.tolist()

        def terms(i: int) -> RequestTerms:
            one = of_classes[classes[i]]
            tokens = expected_tokens(prompts[i], expected[i])
            return RequestTerms(
                one.ttft_s, one.tpot_s, one.deadline_s, one.priority, one.late, one.tenant, tokens=tokens
            )

        return terms


class _Came(NamedTuple):
    """Arrivals; requests of a trace have their own lengths and models."""

    arrival_s: Floats
    prompt: Ints | None = None
    output: Ints | None = None
    models: Ints | None = None


def requests(form: ScenarioForm, trace: Trace | None, rate_per_s: float | None, seed: int) -> Traffic:
    """The requests that come before the horizon. Raises ScenarioError."""
    rng = np.random.default_rng((seed, 2))
    came = _arrivals(form, trace, rate_per_s, rng)
    count = len(came.arrival_s)
    shares = np.array([one.share for one in form.classes])
    classes = rng.choice(len(shares), count, p=shares / shares.sum())
    asked = new_asked(count)
    asked.arrival_s = came.arrival_s
    asked.prompt = _lengths(form, "prompt_tokens", classes, came.prompt, rng)
    asked.output = _lengths(form, "output_tokens", classes, came.output, rng)
    mean = float(asked.output.mean()) if count else 1.0
    asked.expected = asked.output if form.traffic.expected_output == "exact" else mean
    asked.variant = _variants(form, came, rng)
    terms = tuple(_terms(form, one) for one in form.classes)
    asked.ttft_s = np.array([_or_inf(one.ttft_s) for one in terms])[classes]
    asked.tpot_s = np.array([_or_inf(one.tpot_s) for one in terms])[classes]
    asked.priority = np.array([one.priority.level for one in terms])[classes]
    _check_lengths(form, asked)
    return Traffic(asked, classes, terms)


def _arrivals(
    form: ScenarioForm, trace: Trace | None, rate_per_s: float | None, rng: np.random.Generator
) -> _Came:
    if trace is not None:
        return _of_trace(form, trace, rate_per_s or trace.rate_per_s)
    assert rate_per_s is not None
    if form.traffic.arrivals is Arrivals.POISSON:
        count = rng.poisson(rate_per_s * form.horizon_s)
        return _Came(np.sort(rng.uniform(0.0, form.horizon_s, count)))
    shape = 1.0 / form.traffic.cv**2
    gaps, until_s = [], 0.0
    while until_s < form.horizon_s:
        more = rng.gamma(shape, 1.0 / (shape * rate_per_s), 1 + int(rate_per_s * form.horizon_s))
        gaps.append(more)
        until_s += float(more.sum())
    arrival_s = np.cumsum(np.concatenate(gaps))
    return _Came(arrival_s[arrival_s < form.horizon_s])


def _of_trace(form: ScenarioForm, trace: Trace, rate_per_s: float) -> _Came:
    """The trace's arrivals, stretched to the rate, up to the horizon, and repeated if requested."""
    gap_s = 1.0 / trace.rate_per_s  # between its end and its next start
    stretch = trace.rate_per_s / rate_per_s
    length_s = (float(trace.arrival_s[-1]) + gap_s) * stretch
    times = math.ceil(form.horizon_s / length_s) if form.traffic.repeat else 1
    count = times * len(trace.arrival_s)
    if count > MAX_REQUESTS:
        raise ScenarioError(
            f"traffic.repeat: expected at most {MAX_REQUESTS} requests until horizonS, got {count:.4g}: the "
            f"trace is {length_s:.3g} s long; shorten horizonS, or give ratePerS"
        )
    arrival_s = np.concatenate([trace.arrival_s * stretch + n * length_s for n in range(times)])
    within = arrival_s < form.horizon_s

    def again(values: Ints | None) -> Ints | None:
        return None if values is None else np.tile(values, times)[within]

    return _Came(arrival_s[within], again(trace.prompt), again(trace.output), again(trace.models))


def _lengths(
    form: ScenarioForm, field: str, classes: Ints, recorded: Ints | None, rng: np.random.Generator
) -> Ints:
    """Lengths: a class's own take precedence over the traffic's, and these over a trace's."""
    of_all: LengthsForm | None = getattr(form.traffic, field)
    drawn = np.ones(len(classes), np.int64) if recorded is None else recorded.copy()
    if of_all is not None:
        drawn = draw(of_all, len(classes), rng)
    for number, one in enumerate(form.classes):
        own: LengthsForm | None = getattr(one, field)
        if own is not None:
            drawn = np.where(classes == number, draw(own, len(classes), rng), drawn)
    return drawn


def draw(form: LengthsForm, count: int, rng: np.random.Generator) -> Ints:
    mean = form.mean or 0.0
    if form.kind == "fixed":
        drawn = np.full(count, mean)
    elif form.kind == "uniform":
        drawn = rng.integers(form.least, form.most + 1, count).astype(float)
    elif form.kind == "geometric":
        drawn = rng.geometric(1.0 / mean, count).astype(float)
    else:
        deviation = math.sqrt(math.log1p(form.cv**2))
        drawn = rng.lognormal(math.log(mean) - deviation**2 / 2, deviation, count)
    tokens: Ints = np.clip(np.rint(drawn), form.least, form.most).astype(np.int64)
    return tokens


def _variants(form: ScenarioForm, came: _Came, rng: np.random.Generator) -> Ints:
    """The variant of each request; 0: the base."""
    if came.models is not None:
        named = int(came.models.max()) + 1
        if named > form.variant_count:
            raise ScenarioError(
                f"variants: the trace names {named} variants, but the file has {form.variant_count}; set "
                f"variants to {named}"
            )
        return came.models + 1
    if form.variant_count == 0:
        return np.zeros(len(came.arrival_s), np.int64)
    asked = 1 + popular(form, came.arrival_s, rng)
    return np.where(rng.random(len(asked)) < form.popularity.base_share, 0, asked)


def popular(form: ScenarioForm, arrival_s: Floats, rng: np.random.Generator) -> Ints:
    """The variant of each request, from 0: drawn by its place in an order that drifts."""
    count, popularity = form.variant_count, form.popularity
    exponent = popularity.exponent if popularity.kind == "zipf" else 0.0
    weights = np.cumsum(np.arange(1, count + 1) ** -float(exponent))
    places = np.searchsorted(weights / weights[-1], rng.random(len(arrival_s)), side="right")
    places = np.minimum(places, count - 1)
    order = rng.permutation(count)
    if popularity.drift is None:
        return order[places]
    asked = np.empty(len(arrival_s), np.int64)
    epochs = (arrival_s / popularity.drift.period_s).astype(np.int64)
    bounds = np.searchsorted(epochs, np.arange(int(epochs.max(initial=0)) + 2))
    for epoch, (since, until) in enumerate(pairwise(bounds)):
        if epoch:
            moved = rng.permutation(count)[: round(popularity.drift.share * count)]
            order[np.sort(moved)] = order[moved]
        asked[since:until] = order[places[since:until]]
    return asked


def _terms(form: ScenarioForm, one: ClassForm) -> RequestTerms:
    tenants = {tenant.name: Tenant(tenant.name, tenant.weight, tenant.max_waiting) for tenant in form.tenants}
    ttft_s, tpot_s, deadline_s = (
        None if ms is None else MS * ms for ms in (one.ttft_ms, one.tpot_ms, one.deadline_ms)
    )
    return RequestTerms(
        ttft_s,
        tpot_s,
        deadline_s,
        priority=one.priority,
        late=one.late,
        tenant=tenants.get(one.tenant, Tenant(one.tenant)),
    )


def _or_inf(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds


def _check_lengths(form: ScenarioForm, asked: Any) -> None:
    longest = int((asked.prompt.astype(np.int64) + asked.output).max(initial=0))
    least = min(groups.cache_tokens for groups in form.cluster.groups)
    if longest > least:
        raise ScenarioError(
            f"cluster.groups.kvTokens: expected at least {longest}, the longest request's tokens; got {least}"
        )
