"""What a client sees of a plan: the engine's times with the request path (`profiler.request_path`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from profiler.predicting.intervals import inverse
from profiler.predicting.types import Prediction
from profiler.request_path import EngineTimes, RequestPath, served_s
from profiler.types import Interval, Workload


def served(path: RequestPath, load: Workload, single: Prediction, whole: Prediction) -> Prediction:
    """`whole`, the engine's alone, as clients see it. `single`: the same of one request of the load.

    Requests that reach the engine together may wait less for each other, or more: either end may be that.
    """
    engine, path_s = whole.ttft_s, path.mean_s(load.batch, load.input_tokens)
    of_path = Interval(path_s, path_s * path.low, path_s * path.high)

    def seen(share: float, times: Callable[[Prediction, Workload], EngineTimes]) -> float:
        scaled = path.times(share)
        return served_s(scaled, load.batch, load.input_tokens, times(single, load), times(whole, load))

    alone_s = path.mean_s(1, load.input_tokens)
    ttft = Interval(
        seen(1.0, _value),
        min(seen(path.low, _low), engine.low + alone_s * path.low),
        max(seen(path.high, _high), engine.high + alone_s * path.high),
    )
    more = Interval(ttft.value - engine.value, ttft.low - engine.low, ttft.high - engine.high)
    latency = _sum(whole.latency_s, more)
    return dataclasses.replace(
        whole,
        ttft_s=ttft,
        latency_s=latency,
        tokens_per_s=inverse(load.batch * load.output_tokens, latency),
        engine_ttft_s=engine,
        path_s=of_path,
    )


def _value(alone: Prediction, load: Workload) -> EngineTimes:
    return _times(alone.ttft_s.value, alone.latency_s.value, alone.tpot_s.value, load)


def _low(alone: Prediction, load: Workload) -> EngineTimes:
    return _times(alone.ttft_s.low, alone.latency_s.low, alone.tpot_s.low, load)


def _high(alone: Prediction, load: Workload) -> EngineTimes:
    return _times(alone.ttft_s.high, alone.latency_s.high, alone.tpot_s.high, load)


def _times(ttft_s: float, latency_s: float, tpot_s: float, load: Workload) -> EngineTimes:
    """The last request's first token is what is left of the latency without the tokens after it."""
    more = load.output_tokens - 1
    return EngineTimes(ttft_s, max(ttft_s, latency_s - tpot_s * more), tpot_s if more else 0.0)


def _sum(one: Interval, other: Interval) -> Interval:
    return Interval(one.value + other.value, one.low + other.low, one.high + other.high)
