"""A worker in this process, as Ray Serve's replicas have one, for tests that look into its engine."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from testkit import loops
from workers.messages import EngineCall, EngineConfig, VariantRef
from workers.server.worker import Worker

START_S, CLOSE_S = 600, 60
# Each rank would take all cores, and wait for the others by spinning.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@contextmanager
def started(
    config: EngineConfig, environment: dict[str, str]
) -> Iterator[tuple[Worker, asyncio.AbstractEventLoop]]:
    """A started worker, in a loop that runs in a thread. Its processes have this `environment` in addition
    to ours."""
    before = dict(os.environ)
    os.environ.update(environment)
    with loops.in_a_thread() as loop:
        worker = Worker(config, "127.0.0.1")
        try:
            asyncio.run_coroutine_threadsafe(worker.start(), loop).result(START_S)
            yield worker, loop
        finally:
            asyncio.run_coroutine_threadsafe(worker.close(), loop).result(CLOSE_S)
            os.environ.clear()
            os.environ.update(before)


@dataclass
class Lab:
    """A worker on an event loop of its own, in a thread."""

    worker: Worker
    loop: asyncio.AbstractEventLoop

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float = 600) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)


def greedy(model: str, prompt: str | list[int], variant: VariantRef | None, **options: Any) -> EngineCall:
    """A completion of the likeliest tokens, with their ids."""
    body = {
        "model": model,
        "prompt": prompt,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **options,
    }
    return EngineCall("/v1/completions", json.dumps(body).encode(), variant)
