"""A worker in this process, as Ray Serve's replicas have one, for tests that look into its engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager

from testkit import loops
from workers.messages import EngineConfig
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
