"""Requests that are refused after much work, over one and four connections; and what that costs others.

Each connection sends the next request when the last one was answered. No two grammars are equal, so that no
result is remembered. The others are those of `greedy_requests`: their delays are an answer's whole time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from itertools import count, repeat
from typing import Any

from benchmarks import rehearsing
from benchmarks.hardening.greedy_requests import OTHERS, next_to, with_alone
from benchmarks.live.groups import BASE, Running
from controlplane.traffic.body_bounds import MAX_BODY_PARTS

CONNECTIONS = (1, 4)
KEYS = 400_000


def _keys(keys: int) -> bytes:
    body = {"model": BASE, "prompt": "w1", "x": dict.fromkeys((f"{n:x}" for n in range(keys)), 1)}
    return json.dumps(body, separators=(",", ":")).encode()


def _grammars(grammar_of: Callable[[int], dict[str, Any]]) -> Iterator[bytes]:
    body = {"model": BASE, "prompt": "w1", "max_tokens": 1}
    for number in count(900):
        yield json.dumps({**body, "structured_outputs": grammar_of(number)}).encode()


def _repeated(number: int) -> dict[str, Any]:
    return {"regex": f"(([a-z ]{{1,40}}){{1,40}}){{1,{number}}}"}


def _large(number: int) -> dict[str, Any]:
    """A schema that takes more memory to compile than the engine allows."""
    items = {"type": "integer", "multipleOf": 3}
    return {"json": {"type": "array", "items": items, "minItems": 10**5 + number, "maxItems": 10**6}}


KINDS: dict[str, Iterator[bytes]] = {
    f"{KEYS:,} keys, refused unread": repeat(_keys(KEYS)),
    "as many keys as are read": repeat(_keys(MAX_BODY_PARTS - 16)),
    "a grammar that the gateway refuses": _grammars(_repeated),
    "a grammar that the engine refuses": _grammars(_large),
}


def measure(running: Running, seconds: float) -> dict[str, Any]:
    connections = CONNECTIONS[-1:] if rehearsing.is_rehearsal() else CONNECTIONS

    def each_kind() -> Iterator[dict[str, Any]]:
        for kind, bodies in KINDS.items():
            for number in connections:
                row = asyncio.run(next_to(running, bodies, seconds, number))
                yield {"refused": kind, "connections": number, **row}

    return {"others": OTHERS, **with_alone(running, seconds, each_kind())}
