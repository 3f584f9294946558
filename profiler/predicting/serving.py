"""A client's view of a plan: the engine's times plus the request path (`profiler.request_path`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from profiler.predicting.intervals import inverse
from profiler.predicting.types import Prediction
from profiler.request_path import EngineCurve, EngineTimes, RequestPath, Served, served_s
from profiler.types import Interval, Workload


def served(path: RequestPath, load: Workload, alone: Mapping[int, Prediction]) -> Prediction:
    """Clients' view of the load. `alone`: predictions for the engine alone, by how many of the requests reach
    it together (`request_path.counts_together`).

    Requests that reach the engine together may wait less or more for each other, so both ends of the range
    allow for that.
    """
    whole = alone[load.batch]
    engine, path_s = whole.ttft_s, path.mean_s(load.batch, load.input_tokens)
    of_path = Interval(path_s, path_s * path.low, path_s * path.high)

    def seen(share: float, end: End) -> Served:
        curve = EngineCurve.of({count: _times(found, load, end) for count, found in alone.items()})
        return served_s(path.times(share), load.batch, load.input_tokens, curve)

    value, low, high = seen(1.0, _value), seen(path.low, _low), seen(path.high, _high)
    alone_s = path.mean_s(1, load.input_tokens)
    ttft = Interval(
        value.ttft_s,
        min(low.ttft_s, engine.low + alone_s * path.low),
        max(high.ttft_s, engine.high + alone_s * path.high),
    )
    more = Interval(ttft.value - engine.value, ttft.low - engine.low, ttft.high - engine.high)
    latency = _sum(whole.latency_s, more)
    return dataclasses.replace(
        whole,
        ttft_s=ttft,
        tpot_s=_tpot(whole, load, value, low, high),
        latency_s=latency,
        tokens_per_s=inverse(load.batch * load.output_tokens, latency),
        engine_ttft_s=engine,
        path_s=of_path,
    )


def _tpot(whole: Prediction, load: Workload, value: Served, low: Served, high: Served) -> Interval:
    """TPOT as a client sees it: between its tokens a request waits for the prompts of later requests."""
    more = load.output_tokens - 1
    if not more:
        return whole.tpot_s
    tpot, step = whole.tpot_s, whole.step_s
    seen_s = step.value + value.held_s / more
    return Interval(
        seen_s,
        min(seen_s, tpot.low, step.low + low.held_s / more),
        max(seen_s, tpot.high, step.high + high.held_s / more),
    )


End = Callable[[Interval], float]


def _value(interval: Interval) -> float:
    return interval.value


def _low(interval: Interval) -> float:
    return interval.low


def _high(interval: Interval) -> float:
    return interval.high


def _times(alone: Prediction, load: Workload, end: End) -> EngineTimes:
    more = load.output_tokens - 1
    ttft_s, step_s = end(alone.ttft_s), end(alone.step_s) if more else 0.0
    held_s = (end(alone.tpot_s) - step_s) * more if more else 0.0
    return EngineTimes(ttft_s, max(ttft_s, end(alone.ttft_last_s)), step_s, held_s)


def _sum(one: Interval, other: Interval) -> Interval:
    return Interval(one.value + other.value, one.low + other.low, one.high + other.high)
