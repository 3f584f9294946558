"""Measures a running engine with different numbers of variants at once, through the public API.

Each limit N gets one burst: `concurrency` callers send requests to the variants in turn, without a pause, for
`seconds`.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from controlplane import errors
from controlplane.client.client import Client
from controlplane.management.schemas.models import DeploymentView
from profiler.variant_limit import SlotMeasurement, candidate_limits, choose_limit

PATH = "/v1/completions"
PROMPT = "Here is a long list of simple words, one after another, that somebody wrote down:"
MIN_SILENCE_S = 0.1


@dataclass(frozen=True)
class Burst:
    """`max_tokens` is the length of each answer, unless its deployment allows less."""

    seconds: float = 6.0
    concurrency: int = 8
    max_tokens: int = 32


@dataclass(frozen=True)
class Profile:
    measurements: tuple[SlotMeasurement, ...]
    chosen: int


def run(
    client: Client, name: str, burst: Burst, max_ttft_s: float | None, tell: Callable[[str], None]
) -> Profile:
    """Measure every sensible N on the engine of base `name`, and set the best.

    If this fails, the engine gets its former N back. Errors: NotDeployed, InvalidRequest (a variant, too few
    variants), NotReady, and those of inference.
    """
    view = client.deployment(name)
    slots, variants = _subject(view)
    with _restored(client, view, slots):
        for variant in variants:
            tell(f"reading '{variant}' into memory and sending it one request")
            client.prefetch(variant)
            _warm_up(client, variant, burst)
        measurements = []
        for limit in candidate_limits(slots, len(variants)):
            tell(f"{limit} variants at once: measuring for {burst.seconds:g} s")
            client.tune(name, limit)
            measurements.append(measure(client, variants, limit, burst))
        chosen = choose_limit(measurements, max_ttft_s)
        client.tune(name, chosen)
    return Profile(tuple(measurements), chosen)


def _subject(view: DeploymentView) -> tuple[int, list[str]]:
    """The engine's slots, and the variants that are deployed on the base."""
    if view.model != view.host:
        raise errors.InvalidRequest(
            f"'{view.model}' is a variant; run the command for its base, '{view.host}'"
        )
    if not view.residency or view.plan is None:
        why = view.residencyReason or view.reason
        raise errors.NotReady(f"the engine of '{view.model}' cannot be profiled now ({why}); try again")
    variants = [v.model for v in view.residency[0].variants]
    if len(variants) < 2:
        raise errors.InvalidRequest(
            f"--profile needs at least two deployed variants, but '{view.model}' has {len(variants)}; deploy "
            "the variants that you expect, or give --max-active-variants"
        )
    return view.plan.maxVariants, variants


@contextmanager
def _restored(client: Client, view: DeploymentView, slots: int) -> Iterator[None]:
    """After a failure or Ctrl-C, restore the former limit."""
    try:
        yield
    except BaseException:
        client.tune(view.model, view.maxActiveVariants or slots)
        raise


def _warm_up(client: Client, variant: str, burst: Burst) -> None:
    with closing(client.chunks(PATH, _body(variant, 1))) as chunks:
        for _ in chunks:
            pass


def measure(client: Client, variants: Sequence[str], limit: int, burst: Burst) -> SlotMeasurement:
    """Measure one burst. Raises the first caller's error."""
    turns, lock = itertools.cycle(variants), threading.Lock()
    started = time.monotonic()
    deadline = started + burst.seconds

    def caller() -> list[_Reply]:
        replies = []
        while time.monotonic() < deadline:
            with lock:
                variant = next(turns)
            replies.append(_ask(client, variant, burst, deadline))
        return replies

    with ThreadPoolExecutor(burst.concurrency) as pool:
        callers = [pool.submit(caller) for _ in range(burst.concurrency)]
        replies = [reply for future in callers for reply in future.result()]
    took_s = time.monotonic() - started
    return SlotMeasurement(
        limit=limit,
        tokens_per_s=sum(reply.tokens for reply in replies) / took_s,
        ttft_s=statistics.median(reply.ttft_s for reply in replies),
        requests=len(replies),
    )


@dataclass
class _Reply:
    ttft_s: float
    tokens: int = 0


def _ask(client: Client, variant: str, burst: Burst, deadline: float) -> _Reply:
    """Send one request, and stop at the deadline; the tokens until then count."""
    started = time.monotonic()
    reply = _Reply(ttft_s=0.0)
    silence_s = max(MIN_SILENCE_S, deadline - started)
    try:
        with closing(client.chunks(PATH, _body(variant, burst.max_tokens), silence_s)) as chunks:
            for chunk in chunks:
                _count(reply, chunk, started)
                if time.monotonic() >= deadline:
                    break
    except errors.Unavailable:
        if time.monotonic() < deadline:
            raise
    if not reply.tokens:
        reply.ttft_s = time.monotonic() - started
    return reply


def _count(reply: _Reply, chunk: dict[str, Any], started: float) -> None:
    """Count tokens. vLLM reports the number in every chunk; for other engines a chunk counts as a token."""
    count = (chunk.get("usage") or {}).get("completion_tokens")
    tokens = count if count is not None else reply.tokens + bool(chunk["choices"])
    if tokens and not reply.tokens:
        reply.ttft_s = time.monotonic() - started
    reply.tokens = max(reply.tokens, tokens)


def _body(variant: str, max_tokens: int) -> dict[str, Any]:
    """A request for an answer of fixed length, which ignores the end-of-sequence token."""
    usage = {"include_usage": True, "continuous_usage_stats": True}
    return {
        **{"model": variant, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0},
        **{"ignore_eos": True, "stream_options": usage},
    }
