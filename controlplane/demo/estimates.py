"""The demo's estimate, compared with a burst of requests of the same kind."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import psutil
from rich.console import Console

from controlplane.client.client import Client
from controlplane.management.schemas.common import IntervalView
from controlplane.management.schemas.estimates import EstimateRequest, EstimateView
from controlplane.management.schemas.models import InferenceModelRequest
from controlplane.profiling.request_paths import LACKING

PATH = "/v1/completions"
PROMPT = "Somebody wrote down a long list of simple words, one after another: " * 4
TOKENS = 24
BATCH = 4


SETTLE_S = 120.0  # longest wait for the request path and for the rest of an engine's start
QUIET_BELOW = 0.2  # share of the CPUs' time: below it the machine is idle
LOOK_S = 1.0


def settle(console: Console, client: Client, base: str, request: EstimateRequest) -> EstimateView:
    """The estimate, once the request path is measured and this machine is idle. After an engine's start,
    our own work and the path's measurement still run. If the machine stays busy, a message says so."""
    give_up_s, busy = time.monotonic() + SETTLE_S, 1.0
    while True:
        estimate, busy = client.estimate(base, request), psutil.cpu_percent(LOOK_S) / 100
        if (not any(LACKING in note for note in estimate.notes) and busy < QUIET_BELOW) or (
            time.monotonic() > give_up_s
        ):
            break
    if busy >= QUIET_BELOW:
        console.print(
            f"  this machine is busy: other programs take {busy:.0%} of its time; "
            "measured times may be longer than estimated times"
        )
    return estimate


@dataclass(frozen=True)
class Seen:
    """The measured times of one request."""

    ttft_ms: float
    tpot_ms: float


def compare(console: Console, client: Client, base: str, models: Sequence[str]) -> None:
    """Estimate a burst that asks `models` in turn, send it, and print both."""
    warm = InferenceModelRequest(model=base, inputText=PROMPT, maxOutputLength=1, format="raw")
    request = EstimateRequest(
        batch=BATCH,
        inputTokens=client.inference_model(warm).inputTokens,
        outputTokens=TOKENS,
        variants=list(models),
    )
    estimate = settle(console, client, base, request)
    with ThreadPoolExecutor(BATCH) as pool:
        seen = list(pool.map(lambda i: _ask(client, models[i % len(models)], i), range(BATCH)))
    basis = {"profile": "from the profile", "rough": "roughly, without a profile"}[estimate.basis]
    console.print(
        f"  estimated {basis} for {BATCH} at once, {request.inputTokens} tokens in, {TOKENS} out, "
        f"sent to {', '.join(models)} in turn:"
    )
    for name, expected, actual in (
        ("TTFT", estimate.ttftMs, statistics.mean(s.ttft_ms for s in seen)),
        ("TPOT", estimate.tpotMs, statistics.mean(s.tpot_ms for s in seen)),
    ):
        outside = "" if expected.low <= actual <= expected.high else ", outside this range"
        console.print(f"    {name}: {_span(expected)}; measured {actual:.0f} ms{outside}")
    console.print(f"    {_capacity(estimate)}")


def _ask(client: Client, model: str, number: int) -> Seen:
    """Send a unique prompt, so that the engine reads no cached prompt."""
    body = {"model": model, "prompt": f"{number} {PROMPT}", "max_tokens": TOKENS, "temperature": 0}
    times = [time.perf_counter()]
    with closing(client.chunks(PATH, {**body, "ignore_eos": True})) as chunks:
        times += [time.perf_counter() for chunk in chunks if chunk["choices"]]
    return Seen((times[1] - times[0]) * 1e3, (times[-1] - times[1]) / max(1, len(times) - 2) * 1e3)


def _span(i: IntervalView) -> str:
    return f"{i.value:.0f} ms ({i.low:.0f} to {i.high:.0f})"


def _capacity(estimate: EstimateView) -> str:
    (rank, *_) = estimate.ranks
    held = f"{rank.totalBytes.value / 2**30:.2f} GiB a rank"
    if estimate.concurrency is None:
        return held
    return f"{held}; an engine runs {estimate.concurrency} such requests at once"
