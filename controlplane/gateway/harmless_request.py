"""A request of the gateway's own, to tell an engine that fails from an engine whose requests are bad."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from controlplane import errors
from controlplane.gateway.http1 import BrokenOff, NotConnected, head_of
from workers import request_headers

if TYPE_CHECKING:
    from controlplane.gateway.worker_pool import KnownWorker

PATH = "/v1/completions"
# Every tokenizer makes some token of one of these words.
PROMPT = "Hello, 1 a w0"


async def succeeds(worker: KnownWorker, host: str, limit_s: float) -> bool:
    """Whether the worker's engine makes a token of the base within `limit_s`. A refusal is no failure."""
    body = {"model": host, "prompt": PROMPT, "max_tokens": 1}
    headers = request_headers.request_headers(worker.secret, None)
    head = head_of("POST", PATH, {"host": worker.address, **headers})
    try:
        async with asyncio.timeout(limit_s):
            connection = await worker.take()
            try:
                connection.may_move = False
                await connection.ask_with(head, json.dumps(body).encode())
                await connection.read()
                return connection.status < 500 and request_headers.proves(connection.headers, worker.proof)
            finally:
                worker.give_back(connection)
    except (NotConnected, BrokenOff, errors.Cut, TimeoutError):
        return False
