"""What the request path to the engine and back takes until its first token, beside the engine itself.

On it are the proxy, the gateway, the worker's HTTP server and vLLM's front: it checks the request, makes
tokens of the text, and text of the tokens. Each is one process that handles one request after the other. So
of b requests that arrive at once the mean one waits `alone_s + token_s n + each_s (b - 1)`, for prompts of n
tokens; that is measured with an engine whose core answers at once.

In front of a real engine the others' arrival is hidden behind the first one's prompt, but they wait for it,
and for the step behind it: an idle engine begins with whoever comes first. `served_s` follows them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# A request passes the path in both directions. Where one process does both, all of b that arrived at once are
# in before the first is out: the mean one waits (b - 1) (1 / 2 + 1 / 4) of both. Of one direction, over what
# the mean one waits:
ONE_DIRECTION = 2 / 3
OTHERS = 0.2  # by which other clients and other hours differ; assumed
MIN_BURSTS = 2
STEPS = 2000  # that are followed at most
ROUNDING = 1e-9  # of arrivals


@dataclass(frozen=True)
class Burst:
    """Requests that were sent at once, each with a prompt of `input_tokens`, and when their first tokens came
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
    """Seconds as above; `low` and `high` are the ends of their intervals, as shares."""

    alone_s: float
    each_s: float
    token_s: float
    low: float
    high: float

    def mean_s(self, batch: int, input_tokens: int) -> float:
        return self.alone_s + self.token_s * input_tokens + self.each_s * (batch - 1)

    def times(self, share: float) -> RequestPath:
        return RequestPath(self.alone_s * share, self.each_s * share, self.token_s * share, 1.0, 1.0)


# Where none was measured: on the host of an H200 a request alone took 9.7 ms of 128 tokens, and each of
# several 1.8 ms more; on two cores 17 ms and 3.5. Others may be as far from that again.
ASSUMED = RequestPath(alone_s=12e-3, each_s=2.5e-3, token_s=5e-6, low=1 / 3, high=3.0)


@dataclass(frozen=True)
class EngineTimes:
    """When the mean and the last of the first tokens come (seconds), of prompts that reach an idle engine
    together, and what a step takes in which they decode. `held_s`: how much longer than such steps the mean
    one's answer takes after its first token, while prompts of others are filled."""

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
class Served:
    """The mean TTFT as a client sees it, seconds, and `EngineTimes.held_s` with what later arrivals add."""

    ttft_s: float
    held_s: float


def served_s(
    path: RequestPath, batch: int, input_tokens: int, single: EngineTimes, whole: EngineTimes
) -> Served:
    """What `batch` requests that a client sends at once see, if the engine alone takes `single` for one of
    them and `whole` for all; in between it is taken for linear.

    An engine says what is in its next step when a step begins: who comes during a step waits for the one
    after it, too, in which those decode that were there.
    """
    path_s = path.alone_s + path.token_s * input_tokens
    if batch == 1:
        return Served(path_s + whole.mean_s, whole.held_s)
    apart_s = path.each_s * ONE_DIRECTION
    begin_s, takes_s = 0.0, single.last_s  # of the step that runs
    out_s, total_s, first = single.mean_s, single.mean_s, 1
    held_s = 0.0  # of all requests together
    for _ in range(STEPS):
        if first >= batch:
            break
        there = min(batch, int(begin_s / apart_s + ROUNDING) + 1) if apart_s else batch
        count = max(0, there - first)
        begin_s += takes_s
        if not count:
            # Nobody came: until the next one does, steps decode.
            begin_s = max(begin_s, first * apart_s - single.step_s)
            takes_s = single.step_s
            continue
        group = single.toward(whole, (count - 1) / (batch - 1))
        takes_s = group.last_s
        # Their first tokens leave one after the other.
        out_s = max(out_s, begin_s + group.mean_s)
        total_s += count * out_s + apart_s * count * (count - 1) / 2
        # Those that were there wait for the group's prompts, and within the group the first for the last.
        held_s += first * max(0.0, group.last_s - single.step_s) + count * group.held_s
        out_s += apart_s * (count - 1)
        first += count
    else:
        total_s = 0.0  # a step is so short beside all that clients wait for the path alone, as below
        held_s = batch * whole.held_s
    # No engine makes the path itself quicker; a quick one's work is done while others come.
    shown_s = max(0.0, single.mean_s - apart_s * (batch - 1))
    return Served(path_s + max(total_s / batch, path.each_s * (batch - 1) + shown_s), held_s / batch)


def fit(bursts: Sequence[Burst]) -> RequestPath:
    """Of bursts of one request with short and with long prompts, and of several with short ones, each several
    times.

    Raises ValueError when there are too few.
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
