"""Random BOFT adapters for tests, and their meaning in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from workers.kernels import boft
from workers.kernels.boft import Rotation
from workers.kernels.types import offsets, total_bytes, views


def random_rotation(
    inputs: int, outputs: int, factors: int, block: int, dtype: torch.dtype, biased: bool = False
) -> Rotation:
    """Orthogonal blocks by Cayley's transform, rounded as the arena holds them."""
    raw = torch.randn(factors, inputs // block, block, block, dtype=torch.float64) * 0.2 / block**0.5
    blocks = cayley(raw) - torch.eye(block, dtype=torch.float64)
    scale = torch.rand(outputs) + 0.5
    return Rotation(blocks.to(dtype), scale, torch.randn(outputs) if biased else None)


def cayley(raw: torch.Tensor) -> torch.Tensor:
    """Q = (I - S)(I + S)^-1 with S = (R - R^T) / 2."""
    skew = (raw - raw.transpose(-1, -2)) / 2
    one = torch.eye(raw.shape[-1], dtype=raw.dtype)
    solved: torch.Tensor = torch.linalg.solve(one + skew, one - skew, left=False)
    return solved


def permutation(inputs: int, block: int, factor: int) -> torch.Tensor:
    """P_i, float64 [inputs, inputs], word by word: the even half-blocks of each 2^i b, then the odd."""
    half = block // 2
    listed: list[int] = []
    for start in range(0, inputs, block << factor):
        halves = [range(start + h * half, start + (h + 1) * half) for h in range(2 << factor)]
        listed += [column for group in (halves[::2], halves[1::2]) for part in group for column in part]
    matrix = torch.zeros(inputs, inputs, dtype=torch.float64)
    matrix[torch.arange(inputs), torch.tensor(listed)] = 1
    return matrix


def matrix(blocks: torch.Tensor) -> torch.Tensor:
    """Rot = B_{m-1} ... B_0, float64 [K, K], of `blocks` [m, K / b, b, b] that hold Q - I."""
    factors, count, block, _ = blocks.shape
    found = torch.eye(count * block, dtype=torch.float64)
    for factor in range(factors):
        diagonal = torch.block_diag(*(blocks[factor].double() + torch.eye(block, dtype=torch.float64)))
        if factor or block % 2 == 0:
            permuting = permutation(count * block, block, factor)
            diagonal = permuting @ diagonal @ permuting.T
        found = diagonal @ found
    return found


def load(
    slots: Sequence[Sequence[Rotation | None]], dtype: torch.dtype, device: str | torch.device = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arena and table that hold every slot's adapters; the memory between them is poisoned."""
    shapes = [[None if rotation is None else rotation.shape for rotation in slot] for slot in slots]
    sizes = [total_bytes(boft.parts(slot, dtype)) for slot in shapes]
    arena = torch.full((256 + sum(sizes),), 0xFF, dtype=torch.uint8)
    table, start = [], 128
    for slot, shape, size in zip(slots, shapes, sizes, strict=True):
        parts = boft.parts(shape, dtype)
        boft.pack(slot, views(arena, parts, start))
        table.append(boft.describe(shape, offsets(parts, start)))
        start += size
    return arena.to(device), torch.tensor(table, device=device)


def expected(
    x: torch.Tensor, slots: Sequence[Sequence[Rotation | None]], of_rows: np.ndarray
) -> torch.Tensor:
    """float64 [S, rows, K]: every slice's rotated input."""
    found = x.double().cpu().repeat(len(slots[0]), 1, 1)
    matrices = [[rotation and matrix(rotation.blocks) for rotation in slot] for slot in slots]
    for row, slot in enumerate(of_rows):
        for i, rotation in enumerate(matrices[slot] if slot >= 0 else ()):
            if rotation is not None:
                found[i, row] = found[i, row] @ rotation
    return found
