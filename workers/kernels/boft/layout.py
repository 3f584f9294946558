"""The parts of a BOFT adapter, and their places in the arena (Liu et al. 2024; SpartanServe batches them).

The adapter multiplies a slice's input by a rotation Rot = B_{m-1} ... B_0 and its output by s, row by row of
the weights: y = ((x Rot) W^T) * s + bias. Each factor is B_i = P_i blockdiag(Q_i) P_i^T, of orthogonal blocks
[b, b]. The arena stores Q - I, in the activations' type: its values are small, so rounding errors are small,
too. Each block is transposed, outputs by inputs, so that summed values are adjacent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from workers.kernels.types import Part

# A slice's columns of a table row: factors (0: no adapter), block size, offset of the blocks, offset of s,
# whether there is a bias, and its offset.
FIELDS = 6


def width(num_slices: int) -> int:
    """int64s in a table row of a layer with `num_slices` slices."""
    return FIELDS * num_slices


@dataclass(frozen=True)
class Shape:
    """The shape of one slice's adapter: `factors` times `inputs / block` blocks, and `outputs` scales."""

    inputs: int
    outputs: int
    factors: int
    block: int
    biased: bool = False

    def __post_init__(self) -> None:
        if self.factors < 1 or self.block < 2 or self.inputs % (self.block << (self.factors - 1)):
            raise ValueError(
                f"expected inputs to be a multiple of the block size times 2^(factors - 1), got {self.inputs}"
                f" inputs for {self.factors} factors of blocks of {self.block}"
            )
        if self.factors > 1 and self.block % 2:
            raise ValueError(f"expected an even block size for {self.factors} factors, got {self.block}")


@dataclass(frozen=True)
class Rotation:
    """One slice's adapter.

    `blocks`: [m, inputs / b, b, b], Q - I of each block. `scale`: float32 [outputs]; so is `bias`, if there
    is one.
    """

    blocks: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def shape(self) -> Shape:
        if self.blocks.ndim != 4 or self.blocks.shape[2] != self.blocks.shape[3] or self.scale.ndim != 1:
            raise ValueError(
                f"expected blocks [factors, blocks, size, size] and scales [outputs], got"
                f" {list(self.blocks.shape)} and {list(self.scale.shape)}"
            )
        factors, count, block, _ = self.blocks.shape
        return Shape(count * block, len(self.scale), factors, block, self.bias is not None)


def parts(slices: Sequence[Shape | None], dtype: torch.dtype) -> tuple[Part, ...]:
    """A slot's arrays in the arena. `None`: a slice without an adapter. `dtype`: the activations' type."""
    return tuple(part for i, shape in enumerate(slices) if shape for part in _parts(i, shape, dtype))


def _parts(i: int, shape: Shape, dtype: torch.dtype) -> list[Part]:
    blocks = (shape.factors, shape.inputs // shape.block, shape.block, shape.block)
    made = [Part(f"blocks{i}", dtype, blocks), Part(f"scale{i}", torch.float32, (shape.outputs,))]
    if shape.biased:
        made.append(Part(f"bias{i}", torch.float32, (shape.outputs,)))
    return made


def describe(slices: Sequence[Shape | None], offsets: Mapping[str, int]) -> tuple[int, ...]:
    """The slot's table row. `offsets`: the byte of the arena where each part begins."""
    row: list[int] = []
    for i, shape in enumerate(slices):
        if shape is None:
            row += [0] * FIELDS
        else:
            row += [shape.factors, shape.block, offsets[f"blocks{i}"], offsets[f"scale{i}"]]
            row += [int(shape.biased), offsets.get(f"bias{i}", 0)]
    return tuple(row)


def pack(slices: Sequence[Rotation | None], into: Mapping[str, torch.Tensor]) -> None:
    """Write adapters to the memory of their parts."""
    for i, rotation in enumerate(slices):
        if rotation is not None:
            into[f"blocks{i}"].copy_(rotation.blocks.transpose(-1, -2))
            into[f"scale{i}"].copy_(rotation.scale)
            if rotation.bias is not None:
                into[f"bias{i}"].copy_(rotation.bias)


def positions(inputs: int, block: int, factor: int) -> torch.Tensor:
    """int64 [inputs]: the column at each position after factor i permutes them, x P_i.

    Within each 2^i b columns P_i moves the even half-blocks to the front: the two halves of a block come 2^i
    half-blocks apart, as in a fast Fourier transform's butterfly.
    """
    if factor == 0:
        return torch.arange(inputs)
    half, halves = block // 2, 2 << factor
    order = torch.arange(halves).view(2, -1).T  # [2^i, 2]: block u is of halves u and u + 2^i
    columns = order.reshape(-1, 1) * half + torch.arange(half)
    return (torch.arange(0, inputs, half * halves)[:, None] + columns.reshape(1, -1)).flatten()
