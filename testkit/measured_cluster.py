"""The cluster in this process, with a node that computes its measurements by a formula."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import replace

from controlplane import errors
from placement.types import DeviceKey, HolderMemory, Inventory, key_of
from profiler.measurements import Footprint, RankMemory, Timing, to_line
from testkit.in_memory import CPU, InMemoryCluster
from workers.measuring.request import MeasureRequest

HOST = replace(CPU, model="a CPU x2", engine="0.32.0")
TPOT_S = 0.025


class MeasuredCluster(InMemoryCluster):
    """Tells measurements made by a formula, as a node would: what is known is not told again.

    Fails after `fails_after` lines, with `failure`; waits before each line while it is `slow`, or until it
    may `go`. What runs takes `takes_bytes` of its device, and is seen there. `most` ran at once on one.
    """

    def __init__(self) -> None:
        super().__init__(Inventory((HOST,)))
        self.orders: list[MeasureRequest] = []
        self.told = 0
        self.fails_after: int | None = None
        self.failure: Exception = errors.ProfilingFailed("the engine ended with signal SIGKILL")
        self.slow = False
        self.ended = 0
        self.go = asyncio.Event()
        self.go.set()
        self.running: list[tuple[DeviceKey, str]] = []
        self.most = 0
        self.takes_bytes = 0

    async def inventory(self) -> Inventory:
        found = []
        for d in self.devices.devices:
            holders = [holder for at, holder in self.running if at == key_of(d)]
            taken = self.takes_bytes * len(holders)
            uses = tuple(HolderMemory(holder, self.takes_bytes) for holder in holders if taken)
            found.append(replace(d, free_bytes=d.free_bytes - taken, uses=(*d.uses, *uses)))
        return replace(self.devices, devices=tuple(found))

    async def measure(self, request: MeasureRequest, node: str) -> AsyncGenerator[str, None]:
        assert node in {d.node for d in self.devices.devices}
        self.orders.append(request)
        mine = [(DeviceKey(node, request.device_kind, index), request.holder) for index in request.devices]
        self.running += mine
        self.most = max([self.most, *Counter(at for at, _ in self.running).values()])
        try:
            for number, line in enumerate(line for line in lines_of(request) if line not in request.known):
                if self.fails_after is not None and number >= self.fails_after:
                    raise self.failure
                await asyncio.sleep(0.05 if self.slow else 0)
                await self.go.wait()
                self.told += 1
                yield line
        finally:
            self.ended += 1
            for one in mine:
                self.running.remove(one)


def lines_of(request: MeasureRequest) -> list[str]:
    lines = []
    for run in request.engine_runs:
        memory = RankMemory(1 << 20, 0, 0, 300 << 20, 0, 100)
        lines.append(to_line(Footprint(run.setting, (memory,), 2.0, run.distinct_layers, True)))
        for point in run.points:
            ttft_s = 1e-3 * point.batch * point.input_tokens
            made = (ttft_s, ttft_s, TPOT_S, ttft_s + TPOT_S * 11)
            lines.append(to_line(Timing(run.setting, point, run.output_tokens, *made)))
    return lines
