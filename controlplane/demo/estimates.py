"""The demo's account of an estimate, next to a burst of requests of the kind that it is about."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

from rich.console import Console

from controlplane.client.client import Client
from controlplane.management.schemas.common import IntervalView
from controlplane.management.schemas.estimates import EstimateRequest, EstimateView
from controlplane.management.schemas.models import InferenceModelRequest

PATH = "/v1/completions"
PROMPT = "Somebody wrote down a long list of simple words, one after another: " * 4
TOKENS = 24
BATCH = 4


@dataclass(frozen=True)
class Seen:
    """Of one request."""

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
    estimate = client.estimate(base, request)
    with ThreadPoolExecutor(BATCH) as pool:
        seen = list(pool.map(lambda i: _ask(client, models[i % len(models)], i), range(BATCH)))
    basis = {"profile": "from the profile", "rough": "roughly, without a profile"}[estimate.basis]
    console.print(
        f"  estimated {basis} for {BATCH} at once, {request.inputTokens} tokens in, {TOKENS} out, "
        f"asking {', '.join(models)} in turn:"
    )
    for name, expected, actual in (
        ("TTFT", estimate.ttftMs, statistics.mean(s.ttft_ms for s in seen)),
        ("TPOT", estimate.tpotMs, statistics.mean(s.tpot_ms for s in seen)),
    ):
        console.print(f"    {name}: {_span(expected)}; measured {actual:.0f} ms")
    console.print(f"    {_capacity(estimate)}")


def _ask(client: Client, model: str, number: int) -> Seen:
    """A prompt of its own, so that no cached one is read."""
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
    return f"{held}; free memory would hold {estimate.concurrency} such requests at once"
