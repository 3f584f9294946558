"""Streamed completions over OpenAI's wire format, and how each one ended.

Every request has one `Outcome`, whatever happens to it. Seconds count from the start of the load.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import aiohttp
import numpy as np

COMPLETIONS = "/v1/completions"
LOST = ("hung", "cut", "transport", "untyped")  # codes of ours, for what has none
DROPPED = "late"  # the code of what was to be dropped once it was late


class Kind(StrEnum):
    """`failed` has a documented code, `lost` has none: it hung, or its stream was cut."""

    ANSWERED = "answered"
    REFUSED = "refused"
    DROPPED = "dropped"
    FAILED = "failed"
    LOST = "lost"


@dataclass(frozen=True)
class Ask:
    """`group` and `tenant` say what it is counted under."""

    at_s: float
    model: str
    prompt_tokens: int
    output_tokens: int
    group: str = ""
    tenant: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """`code`, `reason`, `message` and `retry_after_s` are those of its error; `error_s` is when that came."""

    ask: Ask
    sent_s: float = 0.0
    first_s: float | None = None
    end_s: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    status: int = 0
    code: str = ""
    reason: str = ""
    message: str = ""
    retry_after_s: float | None = None

    @property
    def kind(self) -> Kind:
        if not self.code:
            return Kind.ANSWERED
        if self.code in LOST:
            return Kind.LOST
        if self.code == DROPPED:
            return Kind.DROPPED
        return Kind.REFUSED if self.status == 429 else Kind.FAILED

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.ask.at_s

    @property
    def wait_s(self) -> float:
        """The time from when it was due to its first token, or to its end if it had none."""
        return (self.end_s if self.first_s is None else self.first_s) - self.ask.at_s

    @property
    def tpot_s(self) -> float | None:
        """None for an answer of one token."""
        if self.first_s is None or self.tokens < 2:
            return None
        return (self.end_s - self.first_s) / (self.tokens - 1)


def text_of(ask: Ask, number: int, vocabulary: int, seed: int) -> str:
    """Random words, each a token; different for each request, so that nothing is cached."""
    rng = np.random.default_rng([seed, number])
    return " ".join(f"w{i}" for i in rng.integers(1, vocabulary, size=ask.prompt_tokens))


@dataclass(frozen=True)
class Target:
    """Where to ask, and what prompts are made of: those of two seeds have nothing in common. A request that
    is not over after `limit_s` hangs."""

    url: str
    vocabulary: int
    limit_s: float = 180.0
    seed: int = 0


async def open_loop(target: Target, asks: Sequence[Ask]) -> list[Outcome]:
    """Each is sent when it is due, however many others are under way. The outcomes in the order of `asks`."""
    tasks: dict[int, asyncio.Task[Outcome]] = {}
    with _left_alone():
        async with _session() as http:
            start = time.perf_counter()
            # They do not start all at once: starting a hundred thousand would delay the first by seconds.
            for number, ask in sorted(enumerate(asks), key=lambda each: each[1].at_s):
                await asyncio.sleep(max(0.0, start + ask.at_s - time.perf_counter()))
                tasks[number] = asyncio.create_task(_ask(http, target, ask, number, start))
            return [await tasks[number] for number in range(len(asks))]


@contextmanager
def _left_alone() -> Iterator[None]:
    """Existing objects are not searched for garbage meanwhile: for a hundred thousand requests that takes
    seconds, which would count as time of answers."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def closed_loop(
    target: Target, asks: Iterator[Ask], clients: int, seconds: float
) -> tuple[list[Outcome], float]:
    """Each client asks again after each answer, for the given time. All outcomes, and how long the run
    took."""
    outcomes: list[Outcome] = []
    async with _session() as http:
        start = time.perf_counter()

        numbers = itertools.count()

        async def client() -> None:
            while (now_s := time.perf_counter() - start) < seconds:
                ask = dataclasses.replace(next(asks), at_s=now_s)
                outcomes.append(await _ask(http, target, ask, next(numbers), start))

        await asyncio.gather(*(client() for _ in range(clients)))
        return outcomes, time.perf_counter() - start


@asynccontextmanager
async def _session() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        yield http


async def _ask(http: aiohttp.ClientSession, target: Target, ask: Ask, number: int, start: float) -> Outcome:
    outcome = Outcome(ask, sent_s=time.perf_counter() - start)
    body = {
        "model": ask.model,
        "prompt": text_of(ask, number, target.vocabulary, target.seed),
        "max_tokens": ask.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        async with asyncio.timeout(target.limit_s):
            await _stream(http, target.url + COMPLETIONS, body, outcome, start)
    except TimeoutError:
        outcome.code = "hung"
    except aiohttp.ClientError as e:
        outcome.code, outcome.reason = "transport", type(e).__name__
    outcome.end_s = outcome.end_s or time.perf_counter() - start
    return outcome


async def _stream(
    http: aiohttp.ClientSession, url: str, body: Mapping[str, Any], outcome: Outcome, start: float
) -> None:
    async with http.post(url, json=body, headers=outcome.ask.headers) as reply:
        outcome.status = reply.status
        if reply.status != 200:
            outcome.retry_after_s = _seconds(reply.headers.get("retry-after"))
            _note_error(outcome, await reply.text())
            return
        done = False
        async for line in reply.content:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                done = True
            elif b'"error"' in line[:16]:
                _note_error(outcome, line[6:].decode())
            else:
                _note_chunk(outcome, json.loads(line[6:]), time.perf_counter() - start)
        if not done and not outcome.code:
            outcome.code = "cut"


def _note_chunk(outcome: Outcome, chunk: dict[str, Any], now_s: float) -> None:
    """A chunk may hold several tokens; the last chunk has their number."""
    if usage := chunk.get("usage"):
        outcome.tokens, outcome.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
    if chunk.get("choices"):
        outcome.first_s = now_s if outcome.first_s is None else outcome.first_s
        outcome.end_s = now_s
        if not usage:
            outcome.tokens += 1


def _note_error(outcome: Outcome, text: str) -> None:
    try:
        error = json.loads(text)["error"]
        outcome.code = str(error["code"])
        outcome.reason = str((error.get("details") or {}).get("reason", ""))
        outcome.message = str(error.get("message", ""))
    except (ValueError, KeyError, TypeError):
        outcome.code, outcome.message = "untyped", text[:200]


def _seconds(header: str | None) -> float | None:
    try:
        return None if header is None else float(header)
    except ValueError:
        return None
