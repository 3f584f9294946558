"""The time that the request path to the engine and back takes until the first token, without the engine.

The path has the proxy, the gateway, the worker's HTTP server and vLLM's front end, which checks the request,
tokenizes its text and detokenizes the answer. Each is one process that handles one request after the other.
So if b requests arrive at once, the mean request waits `alone_s + token_s n + each_s (b - 1)`, for prompts of
n tokens. This is measured with an engine whose core answers at once.

In front of a real engine, other requests arrive while the engine fills the first prompt. They wait for that
prompt and for the step after it: an idle engine begins with the first request to arrive. `served_s` simulates
these arrivals.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# A request passes the path in both directions. If one process handles both, all of b simultaneous requests
# are in before the first is out: the mean request waits (b - 1) (1 / 2 + 1 / 4) of both directions. The time
# of one direction, divided by the mean request's wait:
ONE_DIRECTION = 2 / 3
OTHERS = 0.2  # variation between clients and between hours; assumed
MIN_BURSTS = 2
STEPS = 2000  # the most steps that are simulated
ROUNDING = 1e-9  # of arrivals


@dataclass(frozen=True)
class Burst:
    """Requests sent at once, each with a prompt of `input_tokens`, and the times of their first tokens
    (seconds)."""

    input_tokens: int
    first_s: tuple[float, ...]

    @property
    def batch(self) -> int:
        return len(self.first_s)

    @property
    def mean_s(self) -> float:
        return statistics.mean(self.first_s)


@dataclass(frozen=True)
class RequestPath:
    """Seconds as in the module's formula; `low` and `high` are the ends of their intervals, as shares."""

    alone_s: float
    each_s: float
    token_s: float
    low: float
    high: float

    def mean_s(self, batch: int, input_tokens: int) -> float:
        return self.alone_s + self.token_s * input_tokens + self.each_s * (batch - 1)

    def times(self, share: float) -> RequestPath:
        return RequestPath(self.alone_s * share, self.each_s * share, self.token_s * share, 1.0, 1.0)


# Used if no path was measured. On an H200's host a single request of 128 tokens took 9.7 ms, and each further
# request 1.8 ms more; on two cores 17 ms and 3.5 ms. Other hosts may differ as much again.
ASSUMED = RequestPath(alone_s=12e-3, each_s=2.5e-3, token_s=5e-6, low=1 / 3, high=3.0)


@dataclass(frozen=True)
class EngineTimes:
    """Times (seconds) of prompts that reach an idle engine together: when the mean and the last first token
    come, and how long a step takes in which they decode. `held_s`: how much longer the mean request's answer
    takes after its first token because the engine still fills other prompts."""

    mean_s: float
    last_s: float
    step_s: float
    held_s: float = 0.0

    def toward(self, other: EngineTimes, share: float) -> EngineTimes:
        def between(one: float, two: float) -> float:
            return one + share * (two - one)

        return EngineTimes(
            between(self.mean_s, other.mean_s),
            between(self.last_s, other.last_s),
            between(self.step_s, other.step_s),
            between(self.held_s, other.held_s),
        )


@dataclass(frozen=True)
class EngineCurve:
    """`EngineTimes` by the number of requests that reach an idle engine together: for 1, for the whole batch,
    and for some numbers between. Times are assumed to be linear from each number to the next.

    Several variants' prompts take a step far longer than one variant's, and more prompts of the same variants
    take it little longer. So a line from one request to the whole batch would be too low between them.
    """

    counts: tuple[int, ...]
    times: tuple[EngineTimes, ...]

    @classmethod
    def of(cls, times: Mapping[int, EngineTimes]) -> EngineCurve:
        counts = tuple(sorted(times))
        return cls(counts, tuple(times[count] for count in counts))

    def at(self, count: int) -> EngineTimes:
        at = bisect_left(self.counts, count)
        if self.counts[at] == count:
            return self.times[at]
        below, above = self.counts[at - 1], self.counts[at]
        return self.times[at - 1].toward(self.times[at], (count - below) / (above - below))


def counts_together(batch: int) -> tuple[int, ...]:
    """The numbers of requests for which a curve has the engine's own times: 1, 2, 4, ... and `batch`."""
    return (*(1 << power for power in range((batch - 1).bit_length())), batch)


@dataclass(frozen=True)
class Served:
    """The client's mean TTFT (seconds), and `EngineTimes.held_s` with the delay by later arrivals."""

    ttft_s: float
    held_s: float


def served_s(path: RequestPath, batch: int, input_tokens: int, engine: EngineCurve) -> Served:
    """What `batch` requests sent at once by a client see. `engine`: the times of the engine alone.

    An engine chooses a step's requests when the step begins. A request that arrives during a step also waits
    for the next step, in which the earlier requests decode.
    """
    path_s = path.alone_s + path.token_s * input_tokens
    single, whole = engine.at(1), engine.at(batch)
    if batch == 1:
        return Served(path_s + whole.mean_s, whole.held_s)
    apart_s = path.each_s * ONE_DIRECTION
    begin_s, takes_s = 0.0, single.last_s  # of the current step
    out_s, total_s, first = single.mean_s, single.mean_s, 1
    held_s = 0.0  # of all requests together
    for _ in range(STEPS):
        if first >= batch:
            break
        there = min(batch, int(begin_s / apart_s + ROUNDING) + 1) if apart_s else batch
        count = max(0, there - first)
        begin_s += takes_s
        if not count:
            # No request arrived: until the next arrival, steps decode.
            begin_s = max(begin_s, first * apart_s - single.step_s)
            takes_s = single.step_s
            continue
        group = engine.at(count)
        takes_s = group.last_s
        # The group's first tokens leave one after the other.
        out_s = max(out_s, begin_s + group.mean_s)
        total_s += count * out_s + apart_s * count * (count - 1) / 2
        # Earlier requests wait for the group's prompts; within the group the first request waits for the
        # last.
        held_s += first * max(0.0, group.last_s - single.step_s) + count * group.held_s
        out_s += apart_s * (count - 1)
        first += count
    else:
        total_s = 0.0  # a step is so short that clients wait for the path alone, as below
        held_s = batch * whole.held_s
    # The engine never shortens the path itself; a fast engine finishes while other requests arrive.
    shown_s = max(0.0, single.mean_s - apart_s * (batch - 1))
    return Served(path_s + max(total_s / batch, path.each_s * (batch - 1) + shown_s), held_s / batch)


def fit(bursts: Sequence[Burst]) -> RequestPath:
    """Fit the path to bursts: single requests with short and with long prompts, and several requests with
    short prompts, each burst repeated.

    Raises ValueError when there are too few bursts.
    """
    lengths = sorted({burst.input_tokens for burst in bursts if burst.batch == 1})
    if not lengths:
        raise ValueError("expected requests that were sent alone, got none")
    short, long = lengths[0], lengths[-1]
    singles = [burst.mean_s for burst in bursts if burst.batch == 1 and burst.input_tokens == short]
    alone_s, long_s = statistics.median(singles), _median(bursts, 1, long)
    token_s = max(0.0, long_s - alone_s) / (long - short) if long > short else 0.0
    batches = sorted({burst.batch for burst in bursts if burst.batch > 1 and burst.input_tokens == short})
    if len(singles) < MIN_BURSTS or not batches:
        raise ValueError("expected several requests that were sent alone, and several at once, got fewer")
    slopes = [(_median(bursts, batch, short) - alone_s) / (batch - 1) for batch in batches]
    each_s = max(0.0, statistics.mean(slopes))
    path = RequestPath(max(0.0, alone_s - token_s * short), each_s, token_s, 1.0, 1.0)
    ratios = [burst.mean_s / max(1e-9, path.mean_s(burst.batch, burst.input_tokens)) for burst in bursts]
    tenths = statistics.quantiles(ratios, n=20)
    return RequestPath(
        path.alone_s,
        path.each_s,
        path.token_s,
        min(1.0, tenths[0]) * (1 - OTHERS),
        max(1.0, tenths[-1]) * (1 + OTHERS),
    )


def _median(bursts: Sequence[Burst], batch: int, input_tokens: int) -> float:
    alike = [b.mean_s for b in bursts if (b.batch, b.input_tokens) == (batch, input_tokens)]
    return statistics.median(alike)
