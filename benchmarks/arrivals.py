"""The ways of a variant from host memory to the GPU that `first_token` compares, in one engine.

`MODES`:

- `on demand`: as it was until layers were streamed. The copy waits for all steps that were begun, and the
  variant runs when all of it is there.
- `streamed`: as it is served.

`check` shows on a GPU that a step waits for the bytes that it reads, also from a graph.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from workers.kernels import lora
from workers.kernels.lora import layout
from workers.kernels.rows import Rows
from workers.kernels.types import total_bytes
from workers.variants import device as device_module
from workers.variants import travelling
from workers.variants.device import DeviceMemory
from workers.variants.host import Entry, HostVariant
from workers.variants.pages import page_locked, whole_pages
from workers.variants.slot_uses import SlotUses

ON_DEMAND, STREAMED = "on demand", "streamed"
MODES = (ON_DEMAND, STREAMED)


def switch(worker: Any, mode: str) -> dict[str, float]:
    """Have a rank load variants in this way. Returns the medians of what took time since the last switch, in
    milliseconds. Runs in the rank."""
    manager = worker.model_runner.lora_manager
    _TIMES.follow()
    found = _TIMES.take()
    memory = manager.variant_cache._memory
    if not hasattr(memory, "line_of_its_own"):
        memory.line_of_its_own = memory._line
    memory._line = None if mode == ON_DEMAND else memory.line_of_its_own
    memory.uses.wait = _wait_for_all.__get__(memory.uses) if mode == ON_DEMAND else _usual(memory.uses)
    return found


class _Times:
    """The time of some calls of this process: `await`, that the scheduler waits for a slot (where it is in
    the rank's process); `place`, until steps may use a variant; `read`, until it is in host memory."""

    def __init__(self) -> None:
        self._ms: dict[str, list[float]] = {}
        self._followed = False

    def follow(self) -> None:
        if self._followed:
            return
        self._followed = True
        from workers.engine import scheduler
        from workers.variants.variant_cache import VariantCache

        for owner, name, called in (
            (scheduler._Variants, "_await", "await"),
            (VariantCache, "place", "place"),
            (VariantCache, "_read", "read"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name), called))

    def _timed(self, inner: Any, name: str) -> Any:
        def timed(*given: Any) -> Any:
            start_s = time.perf_counter()
            found = inner(*given)
            if name != "await" or found:
                self._ms.setdefault(name, []).append((time.perf_counter() - start_s) * 1e3)
            return found

        return timed

    def take(self) -> dict[str, float]:
        found = {f"{name}_ms": round(statistics.median(each), 3) for name, each in self._ms.items()}
        self._ms.clear()
        return found


_TIMES = _Times()


def _wait_for_all(uses: SlotUses, stream: torch.cuda.Stream, slot: int) -> None:
    if uses._device.type == "cuda":
        stream.wait_stream(uses._steps or torch.cuda.default_stream(uses._device))


def _usual(uses: SlotUses) -> Callable[[torch.cuda.Stream, int], None]:
    usual: Callable[[torch.cuda.Stream, int], None] = SlotUses.wait.__get__(uses)
    return usual


# --- a check on a GPU, without an engine -----------------------------------------------------------------

LINEARS, INPUTS, OUTPUTS, RANK, ROWS = 64, 1024, (1024, 512), 32, 48
LATE_S = 0.05


def check(device: torch.device) -> dict[str, float]:
    """Raises AssertionError unless a graph of many linears gives with an adapter that arrives late, piece by
    piece, in memory full of NaNs, what it gives with one that is there."""
    names = [f"linear{n}" for n in range(LINEARS)]
    widths = {(name, "lora"): layout.width(len(OUTPUTS)) for name in names}
    variant = _random_variant(names)
    memory = DeviceMemory(widths, 2, 2 * variant.size_bytes, device)
    assert memory.streams(variant), "variants cannot be streamed on this machine"
    x = torch.randn(ROWS, INPUTS, device=device, dtype=torch.bfloat16)
    outs = torch.zeros(LINEARS, ROWS, sum(OUTPUTS), device=device, dtype=torch.bfloat16)
    rows = Rows(ROWS, 2, device)
    scratch = lora.Scratch(ROWS, 2, 2 * RANK, device)

    def step() -> None:
        outs.zero_()
        for name, out in zip(names, outs, strict=True):
            lora.apply(x, out, memory.arena, memory.table((name, "lora")), rows, OUTPUTS, scratch)

    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    rows.update(np.array([*[1] * (ROWS - 8), *[-1] * 8], np.int32))
    memory.place(1, variant)
    memory.settle()
    graph.replay()
    torch.cuda.synchronize()
    expected = outs.clone()
    assert expected[:, : ROWS - 8].abs().sum() > 0
    assert not expected[:, ROWS - 8 :].any()
    took = {}
    for name, late_s in (("at once", 0.0), ("late", LATE_S)):
        memory.clear(1)
        memory.arena.fill_(0xFF)
        outs.zero_()
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        _late(memory, late_s)
        memory.place(1, variant)
        graph.replay()
        torch.cuda.synchronize()
        took[name] = round((time.perf_counter() - began_s) * 1e3, 3)
        assert torch.equal(outs, expected), f"{name}: a step read what had not arrived"
    assert took["late"] > LATE_S * 1e3 * 0.9
    return took


def _late(memory: DeviceMemory, seconds: float) -> None:
    """Make the next variant's pieces wait for a word of host memory that is written after the delay. Its
    table rows, which come before them, do not wait."""
    from cuda.bindings import driver

    if not seconds:
        return
    word = torch.zeros(16, dtype=torch.int64).pin_memory()
    inner, stream = travelling.send, memory._copies
    assert stream is not None

    def send(line: Any, memory: torch.Tensor, into: int, arrivals: Any) -> None:
        driver.cuStreamWaitValue64(stream.cuda_stream, word.data_ptr(), 1, 0)
        inner(line, memory, into, arrivals)
        vars(device_module)["send"] = inner
        threading.Timer(seconds, lambda: word.fill_(1)).start()

    vars(device_module)["send"] = send


def _random_variant(names: list[str]) -> HostVariant:
    ranks = [RANK] * len(OUTPUTS)
    parts = layout.parts(INPUTS, OUTPUTS, ranks, torch.bfloat16)
    size = total_bytes(parts)
    host = torch.from_numpy(whole_pages(size * len(names)))
    values = torch.randn(host.numel() // 2, generator=torch.Generator().manual_seed(0)) * 0.05
    host.view(torch.bfloat16).copy_(values)
    entries = tuple(
        Entry((name, "lora"), parts, n * size, lambda at: layout.describe(ranks, at))
        for n, name in enumerate(names)
    )
    return HostVariant(page_locked(host), entries)
