"""What a sparse delta is, on disk and in the arena.

A delta is what fine-tuning added to a weight matrix: of each group of 4 columns at most 2 values stay, with
4 or 2 bits each and a scale per row, or per row and run of columns (DeltaZip, section 4).

With 4 bits the arena holds a byte of two values for each group of each row, as on disk, and half a byte
that says which columns were kept (bit j: column j); rows o and o + ceil(outputs / 2) share a byte of those.
With 2 bits the indices cost as much as the zeros they avoid: the arena then holds all four columns' codes
in one byte, code 2 where nothing was kept. Both take `bits / 2 + 1` bits per element of the dense matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from workers.kernels.types import Part

FIELDS = 5  # of a slice in a table row: bits (0: no delta), where values, masks and scales lie, scales a row

GROUP = 4  # columns of which two are kept
ALIGNED_COLUMNS = 64  # whose bytes a GPU loads at once
DROPPED = 2  # 2-bit code of the value zero


def width(num_slices: int) -> int:
    """int64s in a table row of a layer with that many slices."""
    return FIELDS * num_slices


@dataclass(frozen=True)
class Shape:
    """Of one slice's delta: [outputs, inputs], with `scales` scales in each row."""

    outputs: int
    inputs: int
    bits: int
    scales: int = 1

    def __post_init__(self) -> None:
        if self.bits not in (2, 4):
            raise ValueError(f"A sparse delta of {self.bits} bits; expected 2 or 4.")
        if self.inputs % 8:
            raise ValueError(f"A sparse delta of {self.inputs} columns; expected a multiple of 8.")
        if self.inputs % self.scales or (self.inputs // self.scales) % GROUP:
            raise ValueError(
                f"{self.scales} scales for {self.inputs} columns; each must serve as many columns as the"
                " others, a multiple of 4."
            )
        if self.scales > 1 and not self.inputs % ALIGNED_COLUMNS and self.columns_per_scale % ALIGNED_COLUMNS:
            raise ValueError(
                f"A scale serves {self.columns_per_scale} of {self.inputs} columns; expected a multiple of"
                f" {ALIGNED_COLUMNS}, or one scale a row."
            )

    @property
    def columns_per_scale(self) -> int:
        return self.inputs // self.scales

    @property
    def half(self) -> int:
        """Row o shares its masks' bytes with row o + half."""
        return -(-self.outputs // 2)


@dataclass(frozen=True)
class Delta:
    """One slice's delta as it lies on disk.

    `values`: uint8, [outputs, inputs / 4] with 4 bits (first kept value in the low half), [outputs,
    inputs / 8] with 2 bits (even group in the low half: v0 | v1 << 2). `indices`: uint8 [outputs,
    inputs / 8] (even group in the low half: i0 | i1 << 2, i0 < i1). `scales`: fp16 [outputs, scales].
    A value is (code - 2^(bits - 1)) * scale.
    """

    values: torch.Tensor
    indices: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> Shape:
        outputs, eighths = self.indices.shape
        bits = {2 * eighths: 4, eighths: 2}.get(self.values.shape[1])
        if bits is None or len(self.values) != outputs or len(self.scales) != outputs:
            raise ValueError(
                f"A sparse delta of values {list(self.values.shape)}, indices {list(self.indices.shape)} and"
                f" scales {list(self.scales.shape)}; expected as many rows of each, and two bytes of values"
                " (4 bits) or one (2 bits) for each byte of indices."
            )
        return Shape(outputs, 8 * eighths, bits, self.scales.shape[1])


def parts(slices: Sequence[Shape | None]) -> tuple[Part, ...]:
    """A slot's arrays in the arena. `None`: a slice without a delta."""
    return tuple(part for i, shape in enumerate(slices) if shape for part in _parts(i, shape))


def _parts(i: int, shape: Shape) -> list[Part]:
    groups = shape.inputs // GROUP
    found = [Part(f"values{i}", torch.uint8, (shape.outputs, groups))]
    if shape.bits == 4:
        found.append(Part(f"masks{i}", torch.uint8, (shape.half, groups)))
    # Scales by column first: the kernel reads those of many rows at once.
    return [*found, Part(f"scales{i}", torch.float16, (shape.scales, shape.outputs))]


def describe(slices: Sequence[Shape | None], offsets: Mapping[str, int]) -> tuple[int, ...]:
    """The slot's table row. `offsets`: where in the arena each part begins."""
    row: list[int] = []
    for i, shape in enumerate(slices):
        if shape is None:
            row += [0] * FIELDS
        else:
            at = (offsets[f"values{i}"], offsets.get(f"masks{i}", 0), offsets[f"scales{i}"])
            row += [shape.bits, *at, shape.scales]
    return tuple(row)


def pack(slices: Sequence[Delta | None], into: Mapping[str, torch.Tensor]) -> None:
    """Write deltas to their parts' memory."""
    for i, delta in enumerate(slices):
        if delta is None:
            continue
        pack_slice = _pack_four_bits if delta.shape.bits == 4 else _pack_two_bits
        pack_slice(delta, i, into)
        into[f"scales{i}"].copy_(delta.scales.T)


def _pack_four_bits(delta: Delta, i: int, into: Mapping[str, torch.Tensor]) -> None:
    kept = _halves(delta.indices)  # [outputs, groups]: i0 | i1 << 2
    masks = (1 << (kept & 3)) | (1 << (kept >> 2))
    half = delta.shape.half
    shared = masks[:half].clone()
    shared[: len(masks) - half] |= masks[half:] << 4
    into[f"values{i}"].copy_(delta.values)
    into[f"masks{i}"].copy_(shared)


def _pack_two_bits(delta: Delta, i: int, into: Mapping[str, torch.Tensor]) -> None:
    kept, values = _halves(delta.indices), _halves(delta.values)
    first, second = 2 * (kept & 3), 2 * (kept >> 2)  # by how many bits each kept code moves up
    dropped = torch.full_like(kept, 0b01010101 * DROPPED)
    dropped &= ~((3 << first) | (3 << second))
    into[f"values{i}"].copy_(dropped | ((values & 3) << first) | ((values >> 2) << second))


def _halves(bytes_: torch.Tensor) -> torch.Tensor:
    """[outputs, n] bytes as [outputs, 2n] half bytes, the low one first."""
    return torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).flatten(1)
