"""The variants that may run: their weights in one arena, without most embeddings, and tables of their places.

No address here changes while the engine lives, so captured CUDA graphs stay valid.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from profiler.roofline import MOVED_AT_ONCE_BYTES
from workers.kernels.lora.layout import TOTAL_RANK
from workers.kernels.types import ALIGNMENT, Part, view
from workers.variants.arena_allocator import ArenaAllocator, Move
from workers.variants.host import HostVariant, TableKey
from workers.variants.pages import chunks, reads_locked_memory, spans
from workers.variants.slot_uses import SlotUses
from workers.variants.travelling import ARRIVAL, Line, line_of, send

Int64s = npt.NDArray[np.int64]

# The operations whose kernels wait for their weights to arrive.
STREAMED = frozenset({"lora"})


class NoRoom(Exception):
    """The arena has no room now for this variant of `size_bytes`; another variant must leave first."""

    def __init__(self, message: str, size_bytes: int) -> None:
        super().__init__(message)
        self.size_bytes = size_bytes


class DeviceMemory:
    """An arena of `arena_bytes` and one table per layer and operation.

    `widths` gives each table's row length. A table is int64 [slots, width]; a row of zeros means that the
    slot adds nothing there.

    Variants move to make room for another, even while steps use them. On a GPU moves run in the order of its
    steps, so each kernel sees a move completely or not at all. Code that reads rows or weights on the host
    must hold `layout`.
    """

    def __init__(
        self, widths: Mapping[TableKey, int], slots: int, arena_bytes: int, device: torch.device
    ) -> None:
        self._device = device
        self._slots = slots
        self.arena = torch.zeros(arena_bytes, dtype=torch.uint8, device=device)
        self._allocator = ArenaAllocator(arena_bytes // ALIGNMENT * ALIGNMENT)
        # Moves over a short distance go through this buffer.
        self._between = torch.empty(min(MOVED_AT_ONCE_BYTES, arena_bytes), dtype=torch.uint8, device=device)
        self.layout = threading.RLock()
        self._widths = dict(widths)
        *begins, whole = itertools.accumulate(widths.values(), initial=0)
        # of each table within a slot's concatenated row
        self._begins = dict(zip(widths, begins, strict=True))
        self._starts = {key: slots * begin for key, begin in self._begins.items()}
        self._flat = torch.zeros(slots * whole, dtype=torch.int64, device=device)
        self.uses = SlotUses(device)
        # Its few kernels write tables, and run before those of concurrent steps.
        self._copies = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._line = line_of(self._copies) if self._copies is not None else None
        self._sent: HostVariant | None = None
        self._described: WeakKeyDictionary[HostVariant, _Described] = WeakKeyDictionary()
        self._placed: dict[int, _Described] = {}  # by slot
        self._staying: dict[int, torch.Tensor] = {}  # by slot: host memory that its rows refer to
        self._left: list[torch.Tensor] = []  # host memory that no row refers to any longer
        positions = [self._positions_of(slot) for slot in range(slots)]
        self._positions_here = [each.numpy() for each in positions]
        self._positions = [each.to(device) for each in positions]
        self._rows = [self._empty_row() for _ in range(slots)]  # as they are on the device

    def table(self, key: TableKey) -> torch.Tensor:
        start, width = self._starts[key], self._widths[key]
        return self._flat[start : start + self._slots * width].view(self._slots, width)

    def fields(self, slot: int, key: TableKey) -> list[int]:
        """One row of a table, from the host's copy, without a transfer from the device."""
        begin = self._begins[key]
        fields: list[int] = self._rows[slot][begin : begin + self._widths[key]].tolist()
        return fields

    def copy_to(self, into: torch.Tensor, slot: int, part: Part, at: int) -> None:
        """Copy a part of the slot's variant to `into`, on the device, in the order of the current stream.

        `at`: the part's byte of the arena in the table row. `into`: a contiguous tensor of the part's values.
        """
        if (here := self.in_arena(slot, part, at)) is not None:
            into.copy_(here.view(into.shape))
            return
        staying = self._staying[slot]
        inside = at - self._at(staying)
        if into.dtype != part.dtype:
            into.copy_(view(staying, part, inside).to(into.dtype).view(into.shape))
            return
        flat = into.view(-1).view(torch.uint8)
        for begin, end in spans(inside, part.size_bytes):
            flat[begin - inside : end - inside].copy_(staying[begin:end], non_blocking=True)

    def in_arena(self, slot: int, part: Part, at: int) -> torch.Tensor | None:
        """The part at byte `at` of the arena, from a table row of the slot; None if it stays on the host."""
        staying = self._staying.get(slot)
        if staying is not None and 0 <= at - self._at(staying) < staying.numel():
            return None
        return view(self.arena, part, at)

    def _at(self, memory: torch.Tensor) -> int:
        """The byte, outside of the arena, at which kernels see host memory."""
        return memory.data_ptr() - self.arena.data_ptr()

    @property
    def reads_host(self) -> bool:
        """Whether kernels read host memory in place."""
        return self._device.type == "cpu" or reads_locked_memory(self._device)

    def staying_bytes(self, but: Iterable[HostVariant] = ()) -> int:
        """Host memory that slots keep, without that of the variants in `but`."""
        known = {id(variant.staying) for variant in but}
        return sum(kept.numel() for kept in [*self._staying.values()] if id(kept) not in known)

    def kept_bytes(self, slot: int) -> int:
        """Host memory that this slot keeps."""
        kept = self._staying.get(slot)
        return 0 if kept is None else kept.numel()

    def left(self) -> list[torch.Tensor]:
        """Take the host memory that slots no longer need; the caller releases it when there is time."""
        left, self._left = self._left, []
        return left

    @property
    def capacity_bytes(self) -> int:
        return self._allocator.capacity

    @property
    def taken_bytes(self) -> int:
        return self._allocator.taken_bytes

    def bytes_of(self, slot: int) -> int:
        return self._allocator.size_of(slot)

    def describe(self, variant: HostVariant) -> None:
        """Compute in advance what placing the variant needs, before any request waits for it."""
        self._described[variant] = self._describe(variant)

    def streams(self, variant: HostVariant) -> bool:
        """Whether steps may use the variant during its copy: if kernels wait for all its parts."""
        return self._line is not None and variant.operations == STREAMED

    def place(self, slot: int, variant: HostVariant) -> None:
        """Copy a variant into a slot; no later step may use the slot before this returns. Raises NoRoom.

        The copy waits for the last step that reads the slot, and runs at the same time as other steps. If the
        variant `streams`, this returns when all copies are queued, and steps wait for them on the device. For
        any other variant it returns when the copy is complete.
        """
        self.settle()
        self._allocator.give_back(slot)
        self._placed.pop(slot, None)
        start = self._take(slot, variant.device_bytes)
        if start is None:
            self._empty(slot)
            taken = f"{self.taken_bytes} of {self.capacity_bytes} are taken"
            raise NoRoom(f"{variant.device_bytes} bytes; {taken}", variant.device_bytes)
        if self._line is not None and self.streams(variant):
            self._send(self._line, slot, variant, start)
        else:
            self._write(slot, self._row(variant, start), (start, variant.memory))
        self._placed[slot] = self._described_of(variant)
        self._exchange(slot, variant.staying)

    def _take(self, slot: int, size: int) -> int | None:
        """Give `size` bytes to the slot, after moves if needed; returns their start, or None."""
        start = self._allocator.take(slot, size)
        if start is None and (moves := self._allocator.moves_for(size)) is not None:
            for move in moves:
                with self.layout, self._in_order_of_steps():
                    self._move(move)
            start = self._allocator.take(slot, size)
        return start

    def _in_order_of_steps(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._copies is None else self.uses.between_steps(self._copies)

    def _move(self, move: Move) -> None:
        """Move all of an owner's weights, and then its rows of all tables. None of its copies is under way:
        see `settle`.
        """
        for begin, end in _moved_spans(move, self._between.numel()):
            self._copy_back(begin, end, move.source - move.target)
        self._allocator.moved(move)
        row = torch.from_numpy(self._placed[move.owner].row_at(move.target))
        here = row if self._copies is None else row.pin_memory()
        self._flat.index_copy_(0, self._positions[move.owner], here.to(self._device, non_blocking=True))
        self._rows[move.owner] = row

    def _copy_back(self, begin: int, end: int, step: int) -> None:
        """Copy bytes [begin, end) of the arena `step` bytes towards its start."""
        source, target = self.arena[begin:end], self.arena[begin - step : end - step]
        if end - begin <= step:
            target.copy_(source, non_blocking=True)
            return
        between = self._between[: end - begin]
        between.copy_(source, non_blocking=True)
        target.copy_(between, non_blocking=True)

    def clear(self, slot: int) -> None:
        """Empty a slot that no later step uses."""
        self.settle()
        self._allocator.give_back(slot)
        self._placed.pop(slot, None)
        self._empty(slot)

    def _empty(self, slot: int) -> None:
        self._write(slot, self._empty_row())
        self._exchange(slot, None)

    def _exchange(self, slot: int, staying: torch.Tensor | None) -> None:
        """Replace the host memory that the slot kept; no step reads the old one, since the row was written
        after them.
        """
        if (before := self._staying.pop(slot, None)) is not None:
            self._left.append(before)
        if staying is not None and staying.numel():
            self._staying[slot] = staying

    def settle(self) -> None:
        """Wait until all placed variants are on the device. Raises the device's error if a copy has
        failed.
        """
        if self._sent is not None and self._copies is not None:
            self._copies.synchronize()
        self._sent = None

    def _send(self, line: Line, slot: int, variant: HostVariant, start: int) -> None:
        self._sent = variant  # its memory must live until it is copied
        described = self._described_of(variant)
        row = described.row_at(start)
        travelling = row.copy()
        travelling[described.awaited] *= -1
        self._write(slot, torch.from_numpy(travelling))
        self._rows[slot] = torch.from_numpy(row)
        arrivals = np.empty(len(described.ends), ARRIVAL)
        arrivals["end"], arrivals["value"] = described.ends, row[described.awaited]
        positions = self._positions_here[slot][described.awaited]
        arrivals["at"] = self._flat.data_ptr() + self._flat.itemsize * positions
        with self._on_device():
            send(line, variant.memory, self.arena.data_ptr() + start, arrivals)

    def _on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._copies) if self._copies is not None else nullcontext()

    def _write(self, slot: int, row: torch.Tensor, weights: tuple[int, torch.Tensor] | None = None) -> None:
        if self._copies is None:
            self._copy(slot, row, weights)
            return
        with torch.cuda.stream(self._copies):
            self.uses.wait(self._copies, slot)
            self._copy(slot, row.pin_memory(), weights)
        self._copies.synchronize()

    def _copy(self, slot: int, row: torch.Tensor, weights: tuple[int, torch.Tensor] | None) -> None:
        if weights is not None:
            start, memory = weights
            for chunk in chunks(memory):
                self.arena[start : start + chunk.numel()].copy_(chunk, non_blocking=True)
                start += chunk.numel()
                if self._copies is not None:  # so that a step's own copies run between two chunks
                    self._copies.synchronize()
        self._flat.index_copy_(0, self._positions[slot], row.to(self._device, non_blocking=True))
        self._rows[slot] = row

    def _positions_of(self, slot: int) -> torch.Tensor:
        spans = [
            torch.arange(start + slot * self._widths[key], start + (slot + 1) * self._widths[key])
            for key, start in self._starts.items()
        ]
        return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)

    def _empty_row(self) -> torch.Tensor:
        return torch.zeros(sum(self._widths.values()), dtype=torch.int64)

    def _row(self, variant: HostVariant, start: int) -> torch.Tensor:
        """All tables' rows of one slot, one after the other, in the order of `_positions`."""
        return torch.from_numpy(self._described_of(variant).row_at(start))

    def _described_of(self, variant: HostVariant) -> _Described:
        if (known := self._described.get(variant)) is not None:
            return known
        return self._describe(variant)

    def _describe(self, variant: HostVariant) -> _Described:
        first, next_ = (np.zeros(sum(self._widths.values()), np.int64) for _ in range(2))
        awaited, ends = [], []
        for entry in variant.entries:
            begin = self._begins[entry.key]
            here = slice(begin, begin + self._widths[entry.key])
            if entry.stays:
                first[here] = next_[here] = entry.row_at(self._at(variant.staying))
            else:
                first[here], next_[here] = entry.row_at(0), entry.row_at(ALIGNMENT)
            if entry.key[1] in STREAMED:
                awaited.append(begin + TOTAL_RANK)
                ends.append(entry.end)
        order = np.argsort(np.array(ends, np.int64), kind="stable")
        return _Described(
            first, next_ - first, np.array(awaited, np.intp)[order], np.array(ends, np.int64)[order]
        )


def _moved_spans(move: Move, between: int) -> Iterator[tuple[int, int]]:
    """Bytes [begin, end) that are copied at a time, in order: at most the move's distance, or the buffer's
    size if larger.
    """
    length, end = max(move.source - move.target, between), move.source + move.size
    for begin in range(move.source, end, length):
        yield begin, min(begin + length, end)


@dataclass(frozen=True)
class _Described:
    """A variant's rows of all tables, for every start in the arena.

    `row`: the rows for a start of 0. `added`: the increase for every ALIGNMENT bytes of the start. `awaited`:
    the values that kernels wait for; each is valid once the variant's first `ends` bytes have arrived.
    """

    row: Int64s
    added: Int64s
    awaited: npt.NDArray[np.intp]
    ends: Int64s

    def row_at(self, start: int) -> Int64s:
        return self.row + self.added * (start // ALIGNMENT)
