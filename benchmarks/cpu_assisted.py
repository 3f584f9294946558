"""CaraServe's CPU-assisted prefill (section 4), as small as it can be measured honestly; not served.

For a linear whose factors have not arrived, the GPU writes the rows' inputs to memory that it shares with
some processes, and then a number there; nobody waits on the host for that. The processes poll the number.
Each computes x A B of its share of the rows, writes it, and then the number of its own, for which the GPU
waits before it takes the result and adds it. So such a step runs without a graph.
"""

from __future__ import annotations

import functools
import multiprocessing
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import torch

from workers.kernels.lora.layout import HEAD, PER_SLICE
from workers.variants import device as device_module
from workers.variants import operators, travelling
from workers.variants.alone import BASE_UID
from workers.variants.graph_choice import Requests
from workers.variants.host import HostVariant

PROCESSES = 12  # of the 16 cores of the machine that it was measured on
MAX_ROWS, MAX_IN, MAX_OUT = 256, 11008, 22016
RING, LAYERS, FIELDS, LINE = 1024, 512, 24, 8  # int64s: jobs, linears and their fields, and of a cache line
WEIGHTS_BYTES = 400 << 20
PORTABLE_AND_MAPPED = 3


class Shared:
    """The memory's parts. `go` is the number of the newest job, `done` each process's last one."""

    def __init__(self, memory: SharedMemory) -> None:
        assert memory.buf is not None
        self.memory, self._bytes = memory, memory.buf
        self._at = 0
        words = self._words(LINE * (PROCESSES + 1)).reshape(-1, LINE)
        self.go, self.done, self.ready = words[0], words[1:, 0], words[1:, 1]
        self.go_at = words[0].ctypes.data
        self.done_at = [words[n, :1].ctypes.data for n in range(1, PROCESSES + 1)]
        self.jobs = self._words(RING * 2).reshape(RING, 2)  # a linear, and how many rows
        self.linears = self._words(LAYERS * FIELDS).reshape(LAYERS, FIELDS)
        self.x = self._halves(MAX_ROWS * MAX_IN)
        self.out = self._halves(MAX_ROWS * MAX_OUT)
        self.weights_at = self._at
        self.weights = np.frombuffer(self._bytes, np.uint8, WEIGHTS_BYTES, self._at)

    @staticmethod
    def size() -> int:
        words = LINE * (PROCESSES + 1) + 2 * RING + LAYERS * FIELDS
        return 8 * words + 2 * MAX_ROWS * (MAX_IN + MAX_OUT) + WEIGHTS_BYTES

    def _words(self, count: int) -> Any:
        found = np.frombuffer(self._bytes, np.int64, count, self._at)
        self._at += found.nbytes
        return found

    def _halves(self, count: int) -> torch.Tensor:
        found = torch.frombuffer(self._bytes, dtype=torch.bfloat16, count=count, offset=self._at)
        self._at += 2 * count
        return found

    def matrix(self, at: int, rows: int, columns: int) -> torch.Tensor:
        """Of the weights, whose byte `at` it begins at."""
        start = self.weights_at + at
        flat = torch.frombuffer(self._bytes, dtype=torch.bfloat16, count=rows * columns, offset=start)
        return flat.view(rows, columns)


# --- the processes ----------------------------------------------------------------------------------------


@contextmanager
def processes() -> Iterator[str]:
    """They run meanwhile; the name of the memory that they share."""
    memory = SharedMemory(create=True, size=Shared.size())
    context = multiprocessing.get_context("spawn")
    running = [context.Process(target=_serve, args=(memory.name, n), daemon=True) for n in range(PROCESSES)]
    for each in running:
        each.start()
    shared = Shared(memory)
    while not shared.ready.all():
        time.sleep(0.1)
    try:
        yield memory.name
    finally:
        for each in running:
            each.kill()
        memory.unlink()


def _serve(name: str, number: int) -> None:
    torch.set_num_threads(1)
    shared = Shared(SharedMemory(name))
    seen = 0
    shared.ready[number] = 1
    while True:
        if shared.go[0] <= seen:
            continue  # polled: a wait of the system's would take longer than the work
        seen += 1
        linear, rows = shared.jobs[seen % RING].tolist()
        first, last = rows * number // PROCESSES, rows * (number + 1) // PROCESSES
        if last > first:
            _compute(shared, shared.linears[linear].tolist(), rows, slice(first, last))
        shared.done[number] = seen


def _compute(shared: Shared, fields: list[int], rows: int, own: slice) -> None:
    """`fields`: inputs, outputs, then the table row of a variant at byte 0, then the slices' outputs."""
    inputs, outputs, slices, *row = fields
    a = shared.matrix(row[0], row[1], inputs)
    shrunk = shared.x[: rows * inputs].view(rows, inputs)[own] @ a.T
    out = shared.out[: rows * outputs].view(rows, outputs)[own]
    column, widths = 0, row[HEAD + PER_SLICE * slices :]
    for index in range(slices):
        at, first, rank = row[HEAD + PER_SLICE * index : HEAD + PER_SLICE * (index + 1)]
        width = widths[index]
        part = out[:, column : column + width]
        if rank:
            part.copy_(shrunk[:, first : first + rank] @ shared.matrix(at, rank, width))
        else:
            part.zero_()
        column += width


def rehearse() -> None:
    """Raises AssertionError unless the shares of two slices' rows make up x A B."""
    memory = SharedMemory(create=True, size=Shared.size())
    try:
        shared, rows, inputs, widths, ranks = Shared(memory), 5, 48, (32, 16), (4, 8)
        a = shared.matrix(0, sum(ranks), inputs).copy_(torch.randn(sum(ranks), inputs))
        begins = (2048, 4096)
        bs = [
            shared.matrix(at, r, n).copy_(torch.randn(r, n))
            for at, r, n in zip(begins, ranks, widths, strict=True)
        ]
        x = shared.x[: rows * inputs].view(rows, inputs).copy_(torch.randn(rows, inputs))
        row = [0, sum(ranks), begins[0], 0, ranks[0], begins[1], ranks[0], ranks[1]]
        for own in (slice(0, 2), slice(2, 5)):
            _compute(shared, [inputs, sum(widths), 2, *row, *widths], rows, own)
        shrunk = x.float() @ a.float().T
        expected = torch.cat([shrunk[:, :4] @ bs[0].float(), shrunk[:, 4:] @ bs[1].float()], dim=1)
        torch.testing.assert_close(
            shared.out[: rows * sum(widths)].view(rows, -1).float(), expected, rtol=0.02, atol=0.2
        )
    finally:
        memory.unlink()


# --- in the rank ------------------------------------------------------------------------------------------


class Assistant:
    """Computes on the host what variants add that were sent to the GPU and are not there. `count`: of
    linears."""

    def __init__(self, manager: Any, shared: str) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._manager = manager
        self.shared = Shared(SharedMemory(shared))
        base = torch.frombuffer(self.shared._bytes, dtype=torch.uint8, count=self.shared.weights_at)
        lock = torch.cuda.cudart().cudaHostRegister
        assert int(lock(base.data_ptr(), base.numel(), PORTABLE_AND_MAPPED)) == 0
        self._base = base
        self._room = torch.empty(MAX_ROWS * MAX_OUT, dtype=torch.bfloat16, device=manager._device)
        self._requests = Requests()
        self._linear_of: dict[int, int] = {}  # by the address of its table
        self._ends: dict[int, int] = {}  # of the linears, in the variant's memory
        self._described = False
        # What was sent last: bytes, and when they are there.
        self._events: list[tuple[int, torch.cuda.Event]] = []
        self._arriving: int | None = None  # the slot, while this step's variant is not there
        self._seen = 0
        self.count = 0
        self.by_parts = False

    # what is sent

    def send(self, line: Any, memory: torch.Tensor, into: int, arrivals: Any) -> None:
        stream = self._manager.variant_cache._memory._copies
        assistant = self

        class Noting:
            """The same line; `by_parts` each piece is noted when it is there."""

            def copy(self, into: int, source: int, size: int) -> None:
                line.copy(into, source, size)
                if assistant.by_parts:
                    assistant._note(source + size - memory.data_ptr(), stream)

            def write(self, arrivals: Any) -> None:
                line.write(arrivals)

        self._events = []
        size = memory.numel()
        if not self.by_parts:
            arrivals = arrivals.copy()
            arrivals["end"] = size
        travelling.send(Noting(), memory, into, arrivals)
        self._note(size, stream)

    def _note(self, end: int, stream: Any) -> None:
        event = torch.cuda.Event()
        event.record(stream)
        self._events.append((end, event))

    def describe(self, variant: HostVariant) -> None:
        """All variants of a run have the same shapes, and nearly the same values: the first one's are
        taken."""
        if self._described:
            return
        self._described = True
        self.shared.weights[: variant.device_bytes] = variant.memory.numpy()
        memory = self._manager.variant_cache._memory
        shapes = {shape.name: shape for shape in self._manager.variant_cache._layers}
        for number, entry in enumerate(variant.entries):
            shape = shapes[entry.key[0]]
            fields = [shape.in_size, shape.out_size, len(shape.widths), *entry.row_at(0), *shape.widths]
            self.shared.linears[number, : len(fields)] = fields
            self._linear_of[memory.table(entry.key).data_ptr()] = number
            self._ends[number] = entry.end

    # a step

    def assists(self, step: Any) -> bool:
        """To be asked before each of vLLM's steps (SchedulerOutput)."""
        self._requests.see(step)
        self._arriving = None
        uids = self._requests.variants(step) - {BASE_UID}
        if not uids or self._is_there(self._events[-1][0] if self._events else 0):
            return False
        (uid,) = uids
        self._arriving = self._manager.variant_cache.slot_of[uid]
        return True

    def _is_there(self, end: int) -> bool:
        return next((event.query() for noted, event in self._events if noted >= end), True)

    def takes(self, context: Any) -> bool:
        number = self._linear_of.get(context.tables["lora"].data_ptr())
        if self._arriving is None or number is None:
            return False
        return not self._is_there(self._ends[number])

    def add(self, x: torch.Tensor, out: torch.Tensor, context: Any) -> None:
        slots = context.batch.tokens.grouping.slots
        (own,) = np.nonzero(slots == self._arriving)
        rows = slice(int(own[0]), int(own[-1]) + 1)
        count, driver, stream = len(own), self._driver, torch.cuda.current_stream().cuda_stream
        assert rows.stop - rows.start == count <= MAX_ROWS
        self._seen += 1
        self.count += 1
        self.shared.jobs[self._seen % RING] = (self._linear_of[context.tables["lora"].data_ptr()], count)
        self.shared.x[: count * x.shape[1]].view(count, -1).copy_(x[rows], non_blocking=True)
        driver.cuStreamWriteValue64(stream, self.shared.go_at, self._seen, 0)
        for at in self.shared.done_at:
            driver.cuStreamWaitValue64(stream, at, self._seen, 0)  # until it is as large
        size = count * out.shape[1]
        self._room[:size].copy_(self.shared.out[:size], non_blocking=True)
        out[rows] += self._room[:size].view(count, -1)


# Both model runners of vLLM, each with what chooses its graphs and the flag without which it finds none.
RUNNERS = (
    ("vllm.v1.worker.gpu_model_runner", "cudagraph_dispatcher", "keys_initialized"),
    ("vllm.v1.worker.gpu.model_runner", "cudagraph_manager", "_graphs_captured"),
)


def _run_without_graphs(runner: Any, chooser: str, flag: str) -> None:
    """The steps in which the host computes."""
    inner = runner.execute_model

    @functools.wraps(inner)
    def execute_model(self: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
        found, assistant = getattr(self, chooser, None), _Here.assistant
        assists = _Here.active and assistant is not None and assistant.assists(step)
        if not assists or not getattr(found, flag, False):
            return inner(self, step, *args, **kwargs)
        setattr(found, flag, False)
        try:
            return inner(self, step, *args, **kwargs)
        finally:
            setattr(found, flag, True)

    runner.execute_model = execute_model


class _Here:
    """Of this process."""

    assistant: Assistant | None = None
    active = False
    add = staticmethod(operators.add)


def switch(manager: Any, shared: str, by_parts: bool) -> int:
    """Have it on, with this memory, or off. Gives how many linears were computed on the host since last
    time."""
    if shared and _Here.assistant is None:
        _Here.assistant = Assistant(manager, shared)
        operators.add = _add  # type: ignore[assignment]
        for module, chooser, flag in RUNNERS:
            if module in sys.modules:
                _run_without_graphs(sys.modules[module].GPUModelRunner, chooser, flag)
    if (assistant := _Here.assistant) is None:
        return 0
    count, assistant.count = assistant.count, 0
    assistant.by_parts, assistant._events, assistant._arriving = by_parts, [], None
    _Here.active = bool(shared)
    vars(device_module)["send"] = assistant.send if shared else travelling.send
    if shared:
        held = manager.variant_cache._host
        assistant.describe(next(variant for uid, variant in held.items() if uid % 2 == 0))
    return count


def _add(op: str, x: torch.Tensor, out: torch.Tensor, context: Any, *others: Any) -> None:
    assistant = _Here.assistant
    if _Here.active and op == "lora" and assistant is not None and assistant.takes(context):
        assistant.add(x, out, context)
    else:
        _Here.add(op, x, out, context, *others)
