"""Random deltas for tests, and their meaning, computed from the format's description."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import torch

from workers.kernels import sparse_delta
from workers.kernels.sparse_delta import Delta, Shape
from workers.kernels.types import offsets, total_bytes, views

PAIRS = np.array(list(combinations(range(4), 2)), np.uint8)  # [6, 2]: i0 < i1


def random_delta(shape: Shape, random: np.random.Generator) -> Delta:
    groups = (shape.outputs, shape.inputs // 4)
    kept = PAIRS[random.integers(0, 6, groups)]  # [outputs, groups, 2]
    codes = random.integers(0, 1 << shape.bits, (*groups, 2), np.uint8)
    codes[random.random(groups) < 0.1] = 1 << (shape.bits - 1)  # groups that are all zero
    scales = random.uniform(0.001, 0.02, (shape.outputs, shape.scales))
    return delta_of(kept, codes, scales, shape.bits)


def delta_of(kept: np.ndarray, codes: np.ndarray, scales: np.ndarray, bits: int) -> Delta:
    """`kept`, `codes`: uint8 [outputs, groups, 2]."""
    values = codes[..., 0] | codes[..., 1] << bits  # [outputs, groups]
    if bits == 2:
        values = values[:, ::2] | values[:, 1::2] << 4
    indices = kept[..., 0] | kept[..., 1] << 2
    indices = indices[:, ::2] | indices[:, 1::2] << 4
    return Delta(
        *(torch.from_numpy(np.ascontiguousarray(a)) for a in (values, indices, scales.astype(np.float16)))
    )


def dense(delta: Delta) -> torch.Tensor:
    """float64 [outputs, inputs], bit by bit as the format says."""
    shape, values, indices = delta.shape, delta.values.numpy(), delta.indices.numpy()
    found = np.zeros((shape.outputs, shape.inputs))
    for group in range(shape.inputs // 4):
        index = indices[:, group // 2] >> 4 * (group % 2)
        value = values[:, group] if shape.bits == 4 else values[:, group // 2] >> 4 * (group % 2)
        for k in range(2):
            column = 4 * group + ((index >> 2 * k) & 3).astype(int)
            code = (value >> shape.bits * k) & ((1 << shape.bits) - 1)
            found[np.arange(shape.outputs), column] = code.astype(float) - (1 << (shape.bits - 1))
    scales = delta.scales.double().numpy().repeat(shape.columns_per_scale, axis=1)
    return torch.from_numpy(found * scales)


def load(
    slots: Sequence[Sequence[Delta | None]], device: str | torch.device = "cpu", *, squares: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arena and table that hold every slot's deltas; the memory between them is poisoned."""
    shapes = [
        [None if delta is None else replace(delta.shape, squares=squares) for delta in deltas]
        for deltas in slots
    ]
    sizes = [total_bytes(sparse_delta.parts(slot)) for slot in shapes]
    arena = torch.full((256 + sum(sizes),), 0xFF, dtype=torch.uint8)
    table = []
    start = 128
    for slot, deltas, size in zip(shapes, slots, sizes, strict=True):
        parts = sparse_delta.parts(slot)
        sparse_delta.pack(deltas, views(arena, parts, start))
        table.append(sparse_delta.describe(slot, offsets(parts, start)))
        start += size
    return arena.to(device), torch.tensor(table, device=device)


def expected(
    x: torch.Tensor,
    before: torch.Tensor,
    slots: Sequence[Sequence[Delta | None]],
    of_rows: np.ndarray,
    slices: Sequence[int],
) -> torch.Tensor:
    """The expected outputs, float64."""
    out = before.double()
    for row, slot in enumerate(of_rows):
        columns = torch.split(out[row], list(slices))
        for delta, part in zip(slots[slot] if slot >= 0 else (), columns, strict=False):
            if delta is not None:
                part.add_(dense(delta).to(x.device) @ x[row].double())
    return out
