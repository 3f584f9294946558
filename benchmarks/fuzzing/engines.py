"""Several engines of one machine, each with its own process, that take seeds from one counter."""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

from testkit.fuzz import hostile_bodies
from testkit.fuzz.hostile_bodies import Device, Found

TELL_EVERY_S = 20.0
START_LIMIT_S = 600.0
END_LIMIT_S = 60.0


@dataclass(frozen=True)
class Asked:
    """`engines` of them, each with `at_once` bodies at once, take the seeds until `ends_at_s` (of the clock).
    Before that their two tenants are alone for `alone_s`."""

    seeds: range
    base: Path
    device: Device
    engines: int
    at_once: int
    alone_s: float
    ends_at_s: float


@dataclass
class Result:
    """What one engine has shown so far; `error`: what ended its process early."""

    found: Found
    ended: bool = False
    error: str = ""


class Engines:
    """The processes; `next_seed` is the first seed that none of them has taken."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        spawning = multiprocessing.get_context("spawn")
        self._counter = spawning.Value("q", asked.seeds.start)
        self._told: Any = spawning.Queue()
        self._barrier = spawning.Barrier(asked.engines)  # kept: a process attaches to it by name
        self._processes = [
            spawning.Process(target=_engine, args=(number, asked, self._counter, self._barrier, self._told))
            for number in range(asked.engines)
        ]
        self.results: dict[int, Result] = {}

    @property
    def next_seed(self) -> int:
        return int(self._counter.value)

    def run(self) -> Iterator[dict[int, Result]]:
        """Start them; the results after each report, until all have ended."""
        for process in self._processes:
            process.start()
        while sum(result.ended for result in self.results.values()) < len(self._processes):
            try:
                number, result = self._told.get(timeout=TELL_EVERY_S)
                self.results[number] = result
            except Empty:
                self._mark_dead()
            yield self.results
        for process in self._processes:
            process.join(END_LIMIT_S)
            process.kill()

    def _mark_dead(self) -> None:
        """A process that ended without a report was killed."""
        for number, process in enumerate(self._processes):
            result = self.results.setdefault(number, Result(Found()))
            if process.exitcode is not None and not result.ended:
                _break(result, f"its process ended with {process.exitcode}")


def _break(result: Result, error: str) -> None:
    result.ended, result.error = True, error
    result.found.broken.append({"seed": hostile_bodies.NO_SEED, "what": error})


def _engine(number: int, asked: Asked, counter: Any, barrier: Any, told: Any) -> None:
    """One process with one engine."""
    result = Result(Found())
    try:
        with tempfile.TemporaryDirectory(prefix=f"hostile-{number}-") as name:
            folder = Path(name).resolve()
            with hostile_bodies.serving(folder, asked.base, asked.device) as (served, loop):
                print(f"engine {number} is ready", flush=True)
                asking = _ask(number, served, result, asked, counter, barrier, told)
                asyncio.run_coroutine_threadsafe(asking, loop).result()
        result.ended = True
    except BaseException as e:
        barrier.abort()
        _break(result, f"engine {number}: {e!r}")
        raise
    finally:
        told.put((number, result))


async def _ask(
    number: int,
    served: hostile_bodies.Served,
    result: Result,
    asked: Asked,
    counter: Any,
    barrier: Any,
    told: Any,
) -> None:
    async def report() -> None:
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            told.put((number, copy.deepcopy(result)))  # it is pickled in another thread

    async def together() -> None:
        await asyncio.to_thread(barrier.wait, START_LIMIT_S)

    reporting = asyncio.create_task(report())
    try:
        seeds = _seeds(asked, counter)
        await hostile_bodies.ask_with_others(
            served, seeds, asked.at_once, asked.alone_s, together, result.found
        )
    finally:
        reporting.cancel()


def _seeds(asked: Asked, counter: Any) -> Iterator[int]:
    while time.time() < asked.ends_at_s:
        with counter.get_lock():
            seed = int(counter.value)
            if seed >= asked.seeds.stop:
                return
            counter.value = seed + 1
        yield seed
