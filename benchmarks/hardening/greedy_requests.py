"""One client that asks for the most that one request may, again and again; and what that costs others.

The others are two clients with short prompts and answers. Each greedy request is sent when the request before
it has ended. Delays are an answer's whole time, compared with its time without greedy requests.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count, islice, product, repeat
from typing import Any

import aiohttp
import numpy as np

from benchmarks.hardening.probing import ms
from benchmarks.live.arrivals import Mix, endless
from benchmarks.live.groups import BASE, Running
from benchmarks.live.streaming import COMPLETIONS, Kind, Outcome, Target, closed_loop
from controlplane.api.request_bounds import MAX_GRAMMAR_BYTES, MAX_SEQUENCES, MAX_WORDS
from controlplane.traffic.request_terms import MAX_PROMPT_LOGPROBS, estimated_prompt

OTHERS = 2
SHORT = ((16, 16),)  # tokens of the others' prompts and answers
MOST_LOGPROBS = 20  # vLLM's own limit
JSON = {"content-type": "application/json"}

_seeds = count(1)  # so that no prompt is asked twice


def greedy(running: Running) -> dict[str, dict[str, Any]]:
    """The body of each kind, with the largest value that is let through."""
    served = running.served
    room = served.max_model_len - served.max_output - 1
    # The words are those that the model can say: vLLM ends a request in an error when no token fits its
    # grammar.
    words = [f"w{word}" for word in range(10, 60)]
    choices = ["".join(three) for three in islice(product(words, repeat=3), MAX_GRAMMAR_BYTES // 32)]
    longest = " ".join(f"w{1 + number % 50}" for number in range(room))
    most = MAX_PROMPT_LOGPROBS // estimated_prompt(len(json.dumps(longest))) - 1
    most_sequences = min(MAX_SEQUENCES, max(1, served.rows // 2))
    few, long = {"prompt": "w1 w2 w3"}, {"max_tokens": served.max_output, "ignore_eos": True}
    return {
        "n": {**few, **long, "n": most_sequences, "temperature": 1},
        "logprobs": {**few, **long, "logprobs": MOST_LOGPROBS},
        "prompt": {"prompt": longest, "max_tokens": 1},
        "prompt_logprobs": {"prompt": longest, "max_tokens": 1, "prompt_logprobs": min(MOST_LOGPROBS, most)},
        "stop": {**few, **long, "stop": [f"never {number}" for number in range(MAX_WORDS)]},
        "grammar": {**few, "max_tokens": 8, "structured_outputs": {"choice": choices}},
    }


def measure(running: Running, seconds: float) -> dict[str, Any]:
    def each_kind() -> Iterator[dict[str, Any]]:
        for kind, body in greedy(running).items():
            sent = json.dumps({"model": BASE, "temperature": 0, **body}).encode()
            yield {"greedy": kind, **asyncio.run(next_to(running, repeat(sent), seconds))}

    return {"others": OTHERS, **with_alone(running, seconds, each_kind())}


def with_alone(running: Running, seconds: float, rows: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """The rows of `next_to`. The others are measured alone before and after, so that a machine that became
    slower is seen."""
    alone = [_summary(asyncio.run(_others(running, seconds)))]
    measured = list(rows)
    alone.append(_summary(asyncio.run(_others(running, seconds))))
    if not all(row["answers"] for row in (*alone, *measured)):
        raise RuntimeError(f"expected answers to the others in each part, got {alone} and {measured}")
    idle_ms = max(row["p99_ms"] for row in alone)
    for row in measured:
        row["of_idle_p99"] = round(row["p99_ms"] / idle_ms, 2)
    return {"alone": alone, "beside": measured}


async def _others(running: Running, seconds: float) -> list[Outcome]:
    seed = next(_seeds)
    target = Target(running.cluster.url, running.vocabulary, seed=seed)
    outcomes, _ = await closed_loop(target, endless(Mix((BASE,), SHORT), seed), OTHERS, seconds)
    return outcomes


async def next_to(
    running: Running, bodies: Iterator[bytes], seconds: float, connections: int = 1
) -> dict[str, Any]:
    """What the others saw while each connection sent one of these bodies after the other."""
    statuses: Counter[str] = Counter()
    refusals: set[str] = set()
    taken_s: list[float] = []

    async def ask(http: aiohttp.ClientSession) -> None:
        while True:
            sent = next(bodies)
            began_s = time.monotonic()
            async with http.post(running.cluster.url + COMPLETIONS, data=sent, headers=JSON) as reply:
                text = await reply.text()
            statuses[str(reply.status)] += 1
            taken_s.append(time.monotonic() - began_s)
            if reply.status != 200:
                refusals.add(text[:200])

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
        asking = [asyncio.create_task(ask(http)) for _ in range(connections)]
        outcomes = await _others(running, seconds)
        for task in asking:
            task.cancel()
        failed = [
            e for e in await asyncio.gather(*asking, return_exceptions=True) if isinstance(e, Exception)
        ]
    if failed:
        raise RuntimeError(f"a connection ended: {failed}") from failed[0]
    median_ms = round(1e3 * float(np.median(taken_s)), 1) if taken_s else None
    return {
        "asked": dict(statuses),
        "asked_ms": median_ms,
        "refusal": min(refusals, default=""),
        **_summary(outcomes),
    }


def _summary(outcomes: list[Outcome]) -> dict[str, Any]:
    taken_s = [o.end_s - o.ask.at_s for o in outcomes if o.kind == Kind.ANSWERED]
    return {"answers": len(taken_s), "failed": len(outcomes) - len(taken_s), **ms(taken_s)}
