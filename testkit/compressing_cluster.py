"""A cluster in this process that makes deltas, as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from controlplane import errors
from placement.types import Inventory
from testkit import checkpoints
from testkit.in_memory import CPU, InMemoryCluster
from workers.compression.lines import Artifact, Done, Failed, Line, Progress, Quality, TaskLoss, to_line
from workers.compression.recipe import CompressRequest

QUALITY = Quality((TaskLoss("sums", "exact_match", 0.8, 0.76, 4.0, 1.0, 7.0, 100),))
LAYERS = 4


class ScriptedCompressor(InMemoryCluster):
    """A cluster that makes an adapter of a tiny model, layer by layer; each layer waits until it may `go`.

    It is cut off `cuts` times, each after one more layer (or, with `stuck`, after none). With a `failure` it
    reports that it cannot continue. `done` records, by folder, the layers that were finished before.
    """

    def __init__(self, inventory: Inventory = Inventory((CPU,))) -> None:  # noqa: B008
        super().__init__(inventory)
        self.asked: list[CompressRequest] = []
        self.done: dict[str, int] = {}
        self.cuts, self.stuck = 0, False
        self.failure = ""
        self.quality: Quality | None = None
        self.go = asyncio.Event()
        self.go.set()
        self.running = 0
        self.most = 0

    async def compress(self, request: CompressRequest, node: str) -> AsyncGenerator[str, None]:
        assert node in {d.node for d in self.devices.devices}
        self.asked.append(request)
        request.folder.mkdir(parents=True, exist_ok=True)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            async for line in self._lines(request):
                yield to_line(line)
                await self.go.wait()
        finally:
            self.running -= 1

    async def _lines(self, request: CompressRequest) -> AsyncGenerator[Line, None]:
        folder = str(request.folder)
        yield Progress(self.done.get(folder, 0) / LAYERS, "starting")
        if self.failure:
            yield Failed(self.failure)
            return
        while (layer := self.done.get(folder, 0)) < LAYERS:
            if self.cuts and self.stuck:
                self._cut()
            self.done[folder] = layer + 1
            yield Progress((layer + 1) / LAYERS, f"layer {layer + 1} of {LAYERS}", 8.0)
            if self.cuts:
                self._cut()
        checkpoints.write_adapter(request.artifact)
        yield Done(Artifact(request.recipe.method, "lora", 10, 50, {"q_proj": 0.1}, (), 2.0, self.quality))

    def _cut(self) -> None:
        self.cuts -= 1
        raise errors.Unavailable("the compression's process ended with signal SIGKILL")
