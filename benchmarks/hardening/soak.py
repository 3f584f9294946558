"""More load than there is capacity, while variants come and go: whether memory or open files grow."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks import rehearsing
from benchmarks.hardening.kills import Loop, Operator
from benchmarks.live import memory
from benchmarks.live.arrivals import LENGTHS, REHEARSED_LENGTHS, Mix, endless, poisson
from benchmarks.live.background import Background
from benchmarks.live.groups import Running
from benchmarks.live.streaming import Kind, Target, closed_loop, open_loop
from controlplane.state.repository import Repository
from controlplane.state.stores import open_store

FACTOR = 1.5
CLIENTS_PER_ROW = 1.25
EVERY_S = 10.0
PIECE_S = 60.0  # arrivals are drawn so far ahead


class Files(Background):
    """`with Files(processes):` counts the open files of each process, every `every_s`."""

    def __init__(self, processes: Callable[[], Sequence[psutil.Process]], every_s: float) -> None:
        self._processes, self._every_s = processes, every_s
        super().__init__()
        self.series: dict[int, tuple[str, list[float], list[int]]] = {}

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            for process in self._processes():
                with suppress(psutil.Error):
                    title = " ".join(process.cmdline()[:2]) or process.name()
                    _, at_s, counts = self.series.setdefault(process.pid, (title[-60:], [], []))
                    at_s.append(time.monotonic() - self._start)
                    counts.append(process.num_fds())

    def summary(self) -> list[dict[str, Any]]:
        """Processes that were there for most of the time, those that grew most first."""
        longest = max((len(at_s) for _, at_s, _ in self.series.values()), default=0)
        rows: list[tuple[float, dict[str, Any]]] = []
        for title, at_s, counts in self.series.values():
            if len(at_s) < max(4, longest // 2):
                continue
            quarter = len(counts) // 4 or 1
            first, last = np.mean(counts[:quarter]), np.mean(counts[-quarter:])
            row = {"process": title, "first": round(float(first), 1), "last": round(float(last), 1)}
            rows.append((float(last - first), row))
        return [row for _, row in sorted(rows, key=lambda one: -one[0])][: memory.LARGEST]


def measure(
    running: Running, store_url: str, adapters: Sequence[Path], minutes: float, capacity_s: float
) -> dict[str, Any]:
    lengths = REHEARSED_LENGTHS if rehearsing.is_rehearsal() else LENGTHS
    mix = Mix(running.models, lengths)
    target = Target(running.cluster.url, running.vocabulary, seed=1)
    rate = _capacity(running, target, mix, capacity_s)
    counted: Counter[str] = Counter()
    every_s = 1.0 if rehearsing.is_rehearsal() else EVERY_S
    with closing(open_store(store_url)) as store, ExitStack() as stack:
        operators = [Operator(running, adapters, Repository(store)) for _ in range(2)]
        sampler = stack.enter_context(memory.Sampler(running.processes, every_s))
        files = stack.enter_context(Files(running.processes, every_s))
        for work in (operators[0].change, operators[1].register_again):
            stack.enter_context(Loop(work))
        asyncio.run(_load(target, mix, FACTOR * rate, 60 * minutes, counted))
    seen = memory.memory_rows(sampler.series)
    lasting = memory.lasting(seen)
    return {
        "capacity_per_s": round(rate, 2),
        "rate_per_s": round(FACTOR * rate, 2),
        "minutes": minutes,
        "requests": dict(counted),
        "operations": sum(len(operator.acknowledged) for operator in operators),
        "memory": lasting,
        "processes_that_came_and_went": len(seen) - len(lasting),
        "files": files.summary(),
    }


def _capacity(running: Running, target: Target, mix: Mix, seconds: float) -> float:
    """Answers a second. For engines with a pace the rate is known; for others it is what many clients get."""
    rows, tpot_s = running.served.groups * running.served.rows, running.served.echo_tpot_s
    if tpot_s:
        return float(rows / (tpot_s * np.mean([tokens for _, tokens in mix.lengths])))
    clients = round(CLIENTS_PER_ROW * rows)
    outcomes, took_s = asyncio.run(closed_loop(target, endless(mix, 1), clients, seconds))
    rate = sum(o.kind == Kind.ANSWERED for o in outcomes) / took_s
    if not rate:
        raise RuntimeError("expected answers, got none: there is no capacity to exceed")
    return rate


async def _load(target: Target, mix: Mix, rate: float, seconds: float, counted: Counter[str]) -> None:
    """Piece by piece, so that what is kept of requests does not grow here."""
    pieces = max(1, round(seconds / PIECE_S))
    length_s = min(seconds, PIECE_S)
    begun: list[asyncio.Task[None]] = []

    async def piece(number: int) -> None:
        for outcome in await open_loop(target, poisson(mix, rate, length_s, number + 2)):
            kind = outcome.kind.value
            counted[kind if outcome.kind in (Kind.ANSWERED, Kind.REFUSED) else f"{kind} {outcome.code}"] += 1

    for number in range(pieces):
        begun.append(asyncio.create_task(piece(number)))
        await asyncio.sleep(length_s)
        if (number + 1) % 5 == 0:
            print(f"{number + 1} of {pieces} pieces of the load: {dict(counted)}", flush=True)
    await asyncio.gather(*begun)
