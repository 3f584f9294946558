"""The cluster in this process, with a node that tells measurements made by a formula."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

from in_memory import CPU, InMemoryCluster

from controlplane import errors
from placement.types import Inventory
from profiler.measurements import Footprint, RankMemory, Timing, to_line
from workers.measuring.order import MeasureOrder

HOST = replace(CPU, model="a CPU x2", engine="0.32.0")
TPOT_S = 0.025


class MeasuredCluster(InMemoryCluster):
    """Tells measurements made by a formula, as a node would: what is known is not told again.

    Fails after `fails_after` lines, with `failure`; waits before each line while it is `slow`.
    """

    def __init__(self) -> None:
        super().__init__(Inventory((HOST,)))
        self.orders: list[MeasureOrder] = []
        self.told = 0
        self.fails_after: int | None = None
        self.failure: Exception = errors.ProfilingFailed("the engine ended with signal SIGKILL")
        self.slow = False
        self.ended = 0

    async def measure(self, order: MeasureOrder, node: str) -> AsyncGenerator[str, None]:
        assert node == HOST.node
        self.orders.append(order)
        try:
            for number, line in enumerate(line for line in lines_of(order) if line not in order.known):
                if self.fails_after is not None and number >= self.fails_after:
                    raise self.failure
                await asyncio.sleep(0.05 if self.slow else 0)
                self.told += 1
                yield line
        finally:
            self.ended += 1


def lines_of(order: MeasureOrder) -> list[str]:
    lines = []
    for trial in order.trials:
        memory = RankMemory(1 << 20, 0, 0, 300 << 20, 0, 100)
        lines.append(to_line(Footprint(trial.setting, (memory,), 2.0, trial.distinct_layers, True)))
        for point in trial.points:
            ttft_s = 1e-3 * point.batch * point.input_tokens
            made = (ttft_s, ttft_s, TPOT_S, ttft_s + TPOT_S * 11)
            lines.append(to_line(Timing(trial.setting, point, trial.output_tokens, *made)))
    return lines
