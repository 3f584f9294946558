"""Measures the request path: requests as a client sends them, to engines that answer them at once.

Runs in its own process. The client is httpx, as in OpenAI's client: its own share of the time is the same for
users.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from controlplane import errors
from profiler.request_path import Burst
from workers.messages import ERROR_EVENT

BATCHES = (1, 8, 32)
ROUNDS = 8
WORD = " word"
SHORT, LONG = 16, 1024  # words
WORD_TOKENS = 8  # most tokens of a word, until the tokenizer gives the number
PAUSE_S = 0.02  # between bursts, so that the proxy and the engine finish their own work


@dataclass(frozen=True)
class Probe:
    """The target of the probe: the URL, the `model`, and the marker that its engines know. Prompts have at
    most about `max_tokens`."""

    url: str
    model: str
    marker: str
    api_key: str
    max_tokens: int


def probe(given: Probe) -> list[Burst]:
    """Measure all bursts; takes seconds. Raises httpx.HTTPError, or RuntimeError for an invalid answer."""
    return asyncio.run(_Client(given).bursts())


Tell = Callable[[str, str], Awaitable[list[str]]]


@asynccontextmanager
async def answering_at_once(group_ids: Sequence[str], marker: str, tell: Tell) -> AsyncIterator[None]:
    """Within this block the engines of these groups answer requests with `marker` without their cores.

    `tell` gives a group's replicas a marker; the replicas return their previous marker. Raises EngineFailed
    at the end when the replicas changed since the beginning: the core of another replica may have answered.
    """
    told: dict[str, int] = {}
    try:
        for group_id in group_ids:
            told[group_id] = len(await tell(group_id, marker))
        yield
    finally:
        forgetting = asyncio.gather(*(tell(group_id, "") for group_id in group_ids), return_exceptions=True)
        forgot = await asyncio.shield(forgetting)
    for group_id, answers in zip(group_ids, forgot, strict=True):
        if isinstance(answers, BaseException):
            raise answers
        if answers != [marker] * told[group_id]:
            raise errors.EngineFailed(f"engines of '{group_id}' started or stopped during the measurement")


async def streamed(http: httpx.AsyncClient, body: Mapping[str, Any]) -> tuple[float, float]:
    """Seconds until a completion's first and last token come. Raises httpx.HTTPError, or RuntimeError for
    an invalid answer."""
    began_s, first_s, last_s = time.perf_counter(), 0.0, 0.0
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {(await answer.aread())[:300]!r}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            if line.encode().startswith(ERROR_EVENT):
                raise RuntimeError(line[:300])
            last_s = time.perf_counter() - began_s
            first_s = first_s or last_s
    if not first_s:
        raise RuntimeError("the stream ended without a token")
    return first_s, last_s


class _Client:
    def __init__(self, given: Probe) -> None:
        self._given = given
        self._sent = 0

    async def bursts(self) -> list[Burst]:
        key = self._given.api_key
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=max(BATCHES))
        async with httpx.AsyncClient(
            base_url=self._given.url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=30.0,
            trust_env=False,
            limits=limits,
        ) as http:
            short = max(1, min(SHORT, self._given.max_tokens // WORD_TOKENS))
            tokens = {short: await self._tokens(http, short)}
            long = max(short, min(LONG, self._given.max_tokens * short // tokens[short]))
            tokens[long] = await self._tokens(http, long)
            for batch in BATCHES:  # opens the connections and warms the code
                await self._burst(http, batch, short)
            loads = [(1, short), (1, long), (1, short), *((batch, short) for batch in BATCHES[1:])]
            bursts = []
            for _ in range(ROUNDS):  # loads alternate, so that a passing disturbance affects all of them
                for batch, words in loads:
                    bursts.append(Burst(tokens[words], await self._burst(http, batch, words)))
                    await asyncio.sleep(PAUSE_S)
            return bursts

    async def _burst(self, http: httpx.AsyncClient, batch: int, words: int) -> tuple[float, ...]:
        return tuple(await asyncio.gather(*(self._first_s(http, words) for _ in range(batch))))

    async def _first_s(self, http: httpx.AsyncClient, words: int) -> float:
        first_s, _ = await streamed(http, self._body(words, stream=True))
        return first_s

    async def _tokens(self, http: httpx.AsyncClient, words: int) -> int:
        answer = await http.post("/v1/completions", json=self._body(words, stream=False))
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {answer.text[:300]}")
        return int(json.loads(answer.content)["usage"]["prompt_tokens"])

    def _body(self, words: int, stream: bool) -> dict[str, Any]:
        self._sent += 1
        return {
            "model": self._given.model,
            "prompt": f"{self._sent}{WORD * words}",
            "max_tokens": 1,
            "temperature": 0,
            "stream": stream,
            "request_id": f"{self._given.marker}-{self._sent}",
        }
