"""The variant of each row of a batch, in the forms that kernels need.

Rows are grouped by slot and cut into tiles of at most `block` rows of one slot. A launch allows for a number
of tiles that depends only on the number of rows, never on their variants. So a grid fixed at CUDA graph
capture is valid for every later batch; unused tiles have slot -1 and end at once.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

BASE = -1
SMALL_BLOCK = 16
LARGE_BLOCK = 64
# A launch of this many rows or more uses large tiles (prefill), otherwise small tiles (decoding). For sparse
# deltas in squares the limit is tensor_cores.MANY_FROM.
LARGE_FROM = 512
# In such a launch a variant of at most this many rows may have small tiles of its own (`tiles_by_count`).
FEW_ROWS = 2 * SMALL_BLOCK
# The number of batches whose copies to the device may be under way at once.
STAGINGS = 4
INVARIANT = "VLLM_BATCH_INVARIANT"

Int32s = npt.NDArray[np.int32]
Integers = npt.NDArray[np.integer]


@dataclass(frozen=True)
class Tiles:
    """The tiles of one launch.

    `tiles` is int32 [max_tiles, 3]: slot (-1: no tile), first position in `order`, rows in the tile. `order`
    is int32 [rows]: row numbers grouped by slot; base rows are in no tile. At most `num_rows` rows belong to
    variants.
    """

    num_rows: int
    block: int
    max_tiles: int
    tiles: torch.Tensor
    order: torch.Tensor


@dataclass(frozen=True)
class Grouping:
    """The tiles of a batch as arrays on the host, before they are copied to a device."""

    slots: Int32s
    order: Int32s
    small: Int32s  # tiles of all variants
    large: Int32s
    few: Int32s  # small tiles of variants with at most FEW_ROWS rows
    many: Int32s  # large tiles of the other variants


def max_tiles(num_rows: int, num_slots: int, block: int) -> int:
    """The most tiles that `num_rows` rows of at most `num_slots` variants can need."""
    distinct = min(num_rows, num_slots)
    return distinct + (num_rows - distinct) // block


def max_few_tiles(num_rows: int, num_slots: int) -> int:
    """The most tiles of SMALL_BLOCK rows that variants of at most FEW_ROWS rows each can need."""
    most = -(-FEW_ROWS // SMALL_BLOCK) * num_slots
    return min(most, max_tiles(num_rows, num_slots, SMALL_BLOCK))


def max_many_tiles(num_rows: int, num_slots: int) -> int:
    """The most tiles of LARGE_BLOCK rows that variants of more than FEW_ROWS rows each can need."""
    return max_tiles(num_rows, min(num_slots, num_rows // (FEW_ROWS + 1)), LARGE_BLOCK)


def group(slots: Int32s) -> Grouping:
    """Group rows by slot. `slots`: [rows], the slot of each row, -1 for the base."""
    order = np.argsort(slots, kind="stable").astype(np.int32)
    first = int(np.count_nonzero(slots == BASE))
    order = order[first:]
    used, counts = np.unique(slots[order], return_counts=True)
    small, of_small = _cut(used, counts, SMALL_BLOCK)
    large, of_large = _cut(used, counts, LARGE_BLOCK)
    few = counts <= FEW_ROWS
    return Grouping(slots, order, small, large, small[few[of_small]], large[~few[of_large]])


def _cut(used: Integers, counts: Integers, block: int) -> tuple[Int32s, Integers]:
    """Cut groups of `counts` consecutive rows into tiles [n, 3] of at most `block` rows.

    Returns the tiles, and the group of each.
    """
    per_group = -(-counts // block)
    total = int(per_group.sum())
    starts = np.concatenate(([0], np.cumsum(counts)))[:-1]
    group_of = np.repeat(np.arange(len(used)), per_group)
    within = np.arange(total) - np.repeat(np.cumsum(per_group) - per_group, per_group)
    tiles = np.empty((total, 3), np.int32)
    tiles[:, 0] = used[group_of]
    tiles[:, 1] = starts[group_of] + within * block
    tiles[:, 2] = np.minimum(counts[group_of] - within * block, block)
    return tiles, group_of


@functools.cache
def batch_invariant() -> bool:
    """Whether vLLM's batch-invariant mode is on, by the same variable as vLLM."""
    return bool(int(os.environ.get(INVARIANT, "0")))


@dataclass(frozen=True)
class Run:
    """Rows [start, end) of a batch, all of one slot."""

    slot: int
    start: int
    end: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.end)


def long_runs(slots: Int32s, of: Collection[int], at_least: int) -> tuple[Run, ...]:
    """The runs of `at_least` rows or more whose slot is in `of`, in order."""
    cuts = [0, *(np.flatnonzero(np.diff(slots)) + 1).tolist(), len(slots)]
    runs = (Run(int(slots[a]), a, b) for a, b in itertools.pairwise(cuts) if b - a >= max(1, at_least))
    return tuple(run for run in runs if run.slot in of)


class Rows:
    """The rows of the current batch, on a device, at addresses that never change.

    One int32 buffer holds all arrays, so that a new batch costs one copy to the device.
    """

    def __init__(self, max_rows: int, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.max_rows = max_rows
        sizes = {
            "slots": max_rows,
            "order": max_rows,
            "small": 3 * max_tiles(max_rows, num_slots, SMALL_BLOCK),
            "large": 3 * max_tiles(max_rows, num_slots, LARGE_BLOCK),
            "few": 3 * max_few_tiles(max_rows, num_slots),
            "many": 3 * max_many_tiles(max_rows, num_slots),
        }
        self._device = torch.full((sum(sizes.values()),), BASE, dtype=torch.int32, device=device)
        self._parts = _split(self._device, sizes)
        self._staging = Staging(self._device, sizes)
        self.grouping = group(np.empty(0, np.int32))
        self._groups: list[tuple[int, torch.Tensor]] | None = None

    def update(self, slots: Int32s, grouping: Grouping | None = None) -> None:
        """Describe a new batch. `slots`: [rows], the slot of each row, -1 for the base. `grouping`: the
        grouping of these rows, if it exists already.
        """
        if len(slots) > self.max_rows:
            raise ValueError(f"expected a batch of at most {self.max_rows} rows, got {len(slots)}")
        if np.array_equal(slots, self.grouping.slots):
            return  # as in most steps of decoding: the device has these rows already
        self.grouping = grouping or group(slots)
        self._groups = None
        self._staging.send({name: getattr(self.grouping, name) for name in self._parts})

    def slots(self, num_rows: int) -> torch.Tensor:
        """int32 [num_rows] on the device: the slot of each row, -1 for the base."""
        return self._parts["slots"][:num_rows]

    def tiles(self, num_rows: int) -> Tiles:
        """The tiles for a launch over the first `num_rows` rows (a graph's padded size included)."""
        return self._tiles_of(SMALL_BLOCK if num_rows < LARGE_FROM else LARGE_BLOCK, num_rows)

    def _tiles_of(self, block: int, num_rows: int) -> Tiles:
        most = max_tiles(num_rows, self.num_slots, block)
        return self._tiles("small" if block == SMALL_BLOCK else "large", num_rows, block, most)

    def tiles_by_count(self, num_rows: int, many_from: int = LARGE_FROM) -> tuple[Tiles, ...]:
        """The tiles of several launches that together do the work of one over `tiles`.

        With fewer rows than `many_from` all tiles are small. In vLLM's batch-invariant mode they always are,
        since a row's result may not depend on the other rows.

        In a batch of many rows, a variant with few rows decodes while another one prefills. It gets small
        tiles: its results are then those of any batch in which it has few rows, at the same low cost.
        """
        if batch_invariant():
            many_from = sys.maxsize
        if num_rows < many_from:
            return (self._tiles_of(SMALL_BLOCK, num_rows),)
        few = self._tiles("few", num_rows, SMALL_BLOCK, max_few_tiles(num_rows, self.num_slots))
        many = self._tiles("many", num_rows, LARGE_BLOCK, max_many_tiles(num_rows, self.num_slots))
        return (many, few)

    def _tiles(self, name: str, num_rows: int, block: int, most: int) -> Tiles:
        return Tiles(num_rows, block, most, self._parts[name].view(-1, 3)[:most], self._parts["order"])

    def groups(self) -> list[tuple[int, torch.Tensor]]:
        """(slot, its rows int64 [n]) on the host, for the torch references."""
        if self._groups is None:
            self._groups = list(_by_slot(self.grouping))
        return self._groups


def _by_slot(grouping: Grouping) -> Iterator[tuple[int, torch.Tensor]]:
    order = torch.from_numpy(grouping.order).long()
    slots, firsts = np.unique(grouping.slots[grouping.order], return_index=True)
    ends = [*firsts[1:], len(order)][: len(slots)]  # empty in a batch of the base alone
    for slot, first, end in zip(slots.tolist(), firsts.tolist(), ends, strict=True):
        yield slot, order[first:end]


class Staging:
    """Sends a batch's parts to `to`, on a device.

    There the parts lie one after another, each with the length in `sizes`. The unused end of a part is BASE.
    """

    def __init__(self, to: torch.Tensor, sizes: Mapping[str, int]) -> None:
        self._to = to
        self._staged = [_Staged(sizes, to.device) for _ in range(STAGINGS)]
        self._turn = 0

    def send(self, parts: Mapping[str, Int32s]) -> None:
        self._turn = (self._turn + 1) % STAGINGS
        self._staged[self._turn].send(parts, self._to)


class _Staged:
    """Page-locked memory from which one batch is copied to the device while the next is prepared."""

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._memory = torch.full((sum(sizes.values()),), BASE, dtype=torch.int32, pin_memory=on_gpu)
        self._parts = {name: part.numpy() for name, part in _split(self._memory, sizes).items()}
        self._sent = torch.cuda.Event() if on_gpu else None

    def send(self, parts: Mapping[str, Int32s], to: torch.Tensor) -> None:
        if self._sent is not None:
            self._sent.synchronize()  # of STAGINGS batches ago: long finished, unless the device lags
        for name, part in self._parts.items():
            values = parts[name].reshape(-1)
            part[: len(values)] = values
            part[len(values) :] = BASE
        to.copy_(self._memory, non_blocking=True)
        if self._sent is not None:
            self._sent.record()


def _split(flat: torch.Tensor, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    return dict(zip(sizes, torch.split(flat, list(sizes.values())), strict=True))
