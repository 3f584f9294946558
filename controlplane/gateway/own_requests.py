"""Requests of the gateway's own to a worker: to tell whether its engine fails, and what is about to come."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from enum import Enum, auto
from typing import TYPE_CHECKING

from controlplane import errors
from controlplane.gateway.http1 import BrokenOff, Connection, NotConnected, head_of
from workers import request_headers
from workers.messages import VariantRef

if TYPE_CHECKING:
    from controlplane.gateway.worker_pool import KnownWorker

_REFUSED = request_headers.REFUSED.encode()
COMPLETIONS = "/v1/completions"
# Every tokenizer makes some token of one of these words.
PROMPT = "Hello, 1 a w0"
TELLING_S = 10.0  # a worker that does not listen within this time will see the request itself


class Verdict(Enum):
    WELL = auto()
    FAILING = auto()
    GONE = auto()  # nobody is there, or a stranger
    BUSY = auto()  # it answered nothing in time, or that it takes no request now


async def verdict(worker: KnownWorker, host: str, limit_s: float) -> Verdict:
    """Whether the worker's engine makes a token of the base within `limit_s`."""
    body = json.dumps({"model": host, "prompt": PROMPT, "max_tokens": 1}).encode()
    try:
        connection = await _answered(worker, COMPLETIONS, body, None, limit_s)
    except (BrokenOff, errors.Cut):
        return Verdict.FAILING
    except NotConnected:
        return Verdict.GONE
    except TimeoutError:
        return Verdict.BUSY
    if not request_headers.proves(connection.headers, worker.proof):
        return Verdict.GONE
    if _REFUSED in connection.headers:
        return Verdict.BUSY
    return Verdict.WELL if connection.status < 300 else Verdict.FAILING


async def tell_wanted(worker: KnownWorker, variant: VariantRef) -> None:
    """Have the worker read a variant ahead of its request; what fails is told when the request comes.

    An older worker loads it, and answers 404.
    """
    with suppress(NotConnected, BrokenOff, errors.Cut, TimeoutError):
        await _answered(worker, request_headers.WANTED_PATH, b"", variant, TELLING_S)


async def _answered(
    worker: KnownWorker, path: str, body: bytes, variant: VariantRef | None, limit_s: float
) -> Connection:
    """The connection, of which status and headers can be read. Raises NotConnected, BrokenOff, Cut,
    TimeoutError."""
    headers = {"host": worker.address, **request_headers.request_headers(worker.secret, variant)}
    async with asyncio.timeout(limit_s):
        connection = await worker.take()
        try:
            connection.may_move = False
            await connection.ask_with(head_of("POST", path, headers), body)
            await connection.read()
        finally:
            worker.give_back(connection)
    return connection
