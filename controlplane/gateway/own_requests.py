"""Requests of the gateway's own to a worker: to tell whether its engine fails, and what is about to come."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from controlplane import errors
from controlplane.gateway.http1 import BrokenOff, NotConnected, head_of
from workers import request_headers
from workers.messages import VariantRef

if TYPE_CHECKING:
    from controlplane.gateway.worker_pool import KnownWorker

COMPLETIONS = "/v1/completions"
# Every tokenizer makes some token of one of these words.
PROMPT = "Hello, 1 a w0"
TELLING_S = 10.0  # a worker that does not listen within this time will see the request itself


async def is_well(worker: KnownWorker, host: str, limit_s: float) -> bool:
    """Whether the worker's engine makes a token of the base within `limit_s`. A refusal is no failure."""
    body = json.dumps({"model": host, "prompt": PROMPT, "max_tokens": 1}).encode()
    status = await _status(worker, COMPLETIONS, body, None, limit_s)
    return status is not None and status < 500


async def tell_wanted(worker: KnownWorker, variant: VariantRef) -> None:
    """Have the worker read a variant ahead of its request. What fails here is told when the request comes."""
    await _status(worker, request_headers.WANTED_PATH, b"", variant, TELLING_S)


async def _status(
    worker: KnownWorker, path: str, body: bytes, variant: VariantRef | None, limit_s: float
) -> int | None:
    """Of the worker's whole answer; None when there was none in time."""
    headers = {"host": worker.address, **request_headers.request_headers(worker.secret, variant)}
    try:
        async with asyncio.timeout(limit_s):
            connection = await worker.take()
            try:
                connection.may_move = False
                await connection.ask_with(head_of("POST", path, headers), body)
                await connection.read()
                return connection.status if request_headers.proves(connection.headers, worker.proof) else None
            finally:
                worker.give_back(connection)
    except (NotConnected, BrokenOff, errors.Cut, TimeoutError):
        return None
