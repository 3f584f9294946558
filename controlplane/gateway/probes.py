"""Requests that the gateway itself sends to a worker: probes of its engine, announcements of variants."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from enum import Enum, auto

from controlplane import errors
from controlplane.gateway.known_worker import KnownWorker
from workers import request_headers
from workers.http1.client import BrokenOff, Connection, NotConnected, head_of
from workers.messages import VariantRef

_REFUSED = request_headers.REFUSED.encode()
COMPLETIONS = "/v1/completions"
# Every tokenizer makes at least one token of these words.
PROMPT = "Hello, 1 a w0"
ANNOUNCE_S = 10.0  # a worker that does not answer within this time will see the request itself


class Verdict(Enum):
    WELL = auto()
    FAILING = auto()
    GONE = auto()  # no process listens there, or another process does
    BUSY = auto()  # no answer in time, or the answer that the worker takes no request now


async def verdict(worker: KnownWorker, base: str, limit_s: float) -> Verdict:
    """Whether the worker's engine generates a token of the base within `limit_s`."""
    body = json.dumps({"model": base, "prompt": PROMPT, "max_tokens": 1}).encode()
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


async def announce(worker: KnownWorker, variant: VariantRef) -> None:
    """Have the worker read a variant ahead of its request. Failures are ignored: the request will show them.

    An older worker loads the variant, and answers 404.
    """
    with suppress(NotConnected, BrokenOff, errors.Cut, TimeoutError):
        await _answered(worker, request_headers.WANTED_PATH, b"", variant, ANNOUNCE_S)


async def _answered(
    worker: KnownWorker, path: str, body: bytes, variant: VariantRef | None, limit_s: float
) -> Connection:
    """The connection after the answer, with its status and headers. Raises NotConnected, BrokenOff, Cut,
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
