"""The variants that may run: their weights in one arena, and tables that say where.

Nothing here changes its address while the engine lives, so captured CUDA graphs stay valid.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import torch

from workers.kernels.types import ALIGNMENT
from workers.variants.arena_allocator import ArenaAllocator
from workers.variants.host import HostVariant, TableKey
from workers.variants.pages import chunks


class NoRoom(Exception):
    """The arena has no gap for this variant now; another one must leave first."""


class DeviceMemory:
    """An arena of `arena_bytes` and one table per layer and operation.

    `widths` gives each table's row length; a table is int64 [slots, width], a row of zeros means that
    the slot adds nothing there.
    """

    def __init__(
        self, widths: Mapping[TableKey, int], slots: int, arena_bytes: int, device: torch.device
    ) -> None:
        self._device = device
        self._slots = slots
        self._allocator = ArenaAllocator(arena_bytes // ALIGNMENT * ALIGNMENT)
        self.arena = torch.zeros(arena_bytes, dtype=torch.uint8, device=device)
        self._widths = dict(widths)
        *begins, whole = itertools.accumulate(widths.values(), initial=0)
        self._begins = dict(zip(widths, begins, strict=True))  # of each table in a slot's row of all
        self._starts = {key: slots * begin for key, begin in self._begins.items()}
        self._flat = torch.zeros(slots * whole, dtype=torch.int64, device=device)
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._positions = [self._positions_of(slot).to(device) for slot in range(slots)]
        self._rows = [self._empty_row() for _ in range(slots)]  # as they are on the device

    def table(self, key: TableKey) -> torch.Tensor:
        start, width = self._starts[key], self._widths[key]
        return self._flat[start : start + self._slots * width].view(self._slots, width)

    def fields(self, slot: int, key: TableKey) -> list[int]:
        """One row of a table, without asking the device."""
        begin = self._begins[key]
        fields: list[int] = self._rows[slot][begin : begin + self._widths[key]].tolist()
        return fields

    @property
    def capacity_bytes(self) -> int:
        return self._allocator.capacity

    @property
    def taken_bytes(self) -> int:
        return self._allocator.taken_bytes

    def bytes_of(self, slot: int) -> int:
        return self._allocator.size_of(slot)

    def place(self, slot: int, variant: HostVariant, compute: torch.cuda.Stream | None = None) -> None:
        """Copy a variant into a slot that no running batch uses; returns when it is there.

        The copy waits for what `compute` was given so far (it may still read the slot's old weights)
        and runs beside what comes later. Raises NoRoom.
        """
        self._allocator.give_back(slot)
        start = self._allocator.take(slot, variant.size_bytes)
        if start is None:
            self._write(slot, self._empty_row(), None, compute)
            raise NoRoom(f"{variant.size_bytes} bytes; {self.taken_bytes} of {self.capacity_bytes} are taken")
        self._write(slot, self._row(variant, start), (start, variant.memory), compute)

    def clear(self, slot: int, compute: torch.cuda.Stream | None = None) -> None:
        """Empty a slot that no running batch uses."""
        self._allocator.give_back(slot)
        self._write(slot, self._empty_row(), None, compute)

    def _write(
        self,
        slot: int,
        row: torch.Tensor,
        weights: tuple[int, torch.Tensor] | None,
        compute: torch.cuda.Stream | None,
    ) -> None:
        if self._copies is None:
            self._copy(slot, row, weights)
            return
        with torch.cuda.stream(self._copies):
            self._copies.wait_stream(compute or torch.cuda.default_stream(self._device))
            self._copy(slot, row.pin_memory(), weights)
        self._copies.synchronize()

    def _copy(self, slot: int, row: torch.Tensor, weights: tuple[int, torch.Tensor] | None) -> None:
        if weights is not None:
            start, memory = weights
            for chunk in chunks(memory):
                self.arena[start : start + chunk.numel()].copy_(chunk, non_blocking=True)
                start += chunk.numel()
                if self._copies is not None:  # what a step copies goes between two
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
        """All tables' rows of one slot, one after the other, as `_positions` orders them."""
        row = np.zeros(sum(self._widths.values()), np.int64)
        for entry in variant.entries:
            begin = self._begins[entry.key]
            row[begin : begin + self._widths[entry.key]] = entry.row_at(start)
        return torch.from_numpy(row)
