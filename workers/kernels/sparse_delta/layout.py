"""The format of a sparse delta, on disk and in the arena.

A delta is the difference that fine-tuning added to a weight matrix. At most 2 values of each group of 4
columns are kept, with 4 or 2 bits each and a scale per row, or per row and run of columns (DeltaZip, section
4).

With 4 bits the arena holds a byte of two values for each group of each row, as on disk. It also holds half a
byte with the kept columns (bit j: column j); rows o and o + ceil(outputs / 2) share a byte of those. With 2
bits the indices would cost as much as the zeros they avoid: the arena then holds all four columns' codes in
one byte, code 2 for dropped values. Both take `bits / 2 + 1` bits per element of the dense matrix.

For sparse tensor cores the same number of bytes holds kept values and their indices (`Shape.squares`,
squares.py).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from profiler.variants.sparse import group_problem
from workers.kernels.sparse_delta import squares
from workers.kernels.types import Part

# A slice's columns of a table row: bits (0: no delta), offsets of values, masks and scales, scales per row.
# In squares: bits + IN_SQUARES, offset of the squares, 0, offset of the scales, scales per row.
FIELDS = 5
IN_SQUARES = 8

GROUP = 4  # columns of which two are kept
DROPPED = 2  # 2-bit code of the value zero
TRANSLATED = 1 << 16  # bytes at a time: few enough for a processor's cache


def width(num_slices: int) -> int:
    """int64s in a table row of a layer with `num_slices` slices."""
    return FIELDS * num_slices


@dataclass(frozen=True)
class Shape:
    """The shape of one slice's delta: [outputs, inputs], with `scales` scales in each row.

    `squares`: the arena holds it in the layout of sparse tensor cores.
    """

    outputs: int
    inputs: int
    bits: int
    scales: int = 1
    squares: bool = False

    def __post_init__(self) -> None:
        if self.bits not in (2, 4):
            raise ValueError(f"expected a sparse delta of 2 or 4 bits, got {self.bits}")
        if self.inputs % 8:
            raise ValueError(f"expected a sparse delta with a multiple of 8 columns, got {self.inputs}")
        if self.inputs % self.scales or (self.inputs // self.scales) % GROUP:
            raise ValueError(
                f"expected each scale to serve the same number of columns, a multiple of 4, got {self.scales}"
                f" scales for {self.inputs} columns"
            )
        if problem := group_problem(self.inputs, self.columns_per_scale):
            raise ValueError(
                f"a sparse delta has {self.inputs} columns, {problem}; or use one scale for each row"
            )
        if self.squares and not squares.fits(self.inputs, self.outputs):
            raise ValueError(
                f"expected outputs and inputs in multiples of {squares.SIDE}, got [{self.outputs}, "
                f"{self.inputs}]"
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
                f"expected values, indices and scales with the same number of rows, and two bytes of values"
                f" (4 bits) or one byte (2 bits) for each byte of indices, got {list(self.values.shape)},"
                f" {list(self.indices.shape)} and {list(self.scales.shape)}"
            )
        return Shape(outputs, 8 * eighths, bits, self.scales.shape[1])


def parts(slices: Sequence[Shape | None]) -> tuple[Part, ...]:
    """A slot's arrays in the arena. `None`: a slice without a delta."""
    return tuple(part for i, shape in enumerate(slices) if shape for part in _parts(i, shape))


def _parts(i: int, shape: Shape) -> list[Part]:
    if shape.squares:
        cut = shape.outputs // squares.SIDE, shape.inputs // squares.SIDE
        return [
            Part(f"squares{i}", torch.uint8, (*cut, squares.square_bytes(shape.bits))),
            Part(f"scales{i}", torch.float16, (shape.scales, shape.outputs)),
        ]
    groups = shape.inputs // GROUP
    made = [Part(f"values{i}", torch.uint8, (shape.outputs, groups))]
    if shape.bits == 4:
        made.append(Part(f"masks{i}", torch.uint8, (shape.half, groups)))
    # Scales by column first: the kernel reads the scales of many rows at once.
    return [*made, Part(f"scales{i}", torch.float16, (shape.scales, shape.outputs))]


def describe(slices: Sequence[Shape | None], offsets: Mapping[str, int]) -> tuple[int, ...]:
    """The slot's table row. `offsets`: the byte of the arena where each part begins."""
    row: list[int] = []
    for i, shape in enumerate(slices):
        if shape is None:
            row += [0] * FIELDS
        elif shape.squares:
            row += [shape.bits + IN_SQUARES, offsets[f"squares{i}"], 0, offsets[f"scales{i}"], shape.scales]
        else:
            at = (offsets[f"values{i}"], offsets.get(f"masks{i}", 0), offsets[f"scales{i}"])
            row += [shape.bits, *at, shape.scales]
    return tuple(row)


def pack(slices: Sequence[Delta | None], into: Mapping[str, torch.Tensor]) -> None:
    """Write deltas to the memory of their parts, in squares if there are parts for squares."""
    for i, delta in enumerate(slices):
        if delta is None:
            continue
        if f"squares{i}" in into:
            from workers.kernels.sparse_delta import square_packing  # numba: only where squares are made

            made = into[f"squares{i}"], into[f"scales{i}"]
            square_packing.pack(delta.values, delta.indices, delta.scales, delta.shape.bits, *made)
            continue
        pack_slice = _pack_four_bits if delta.shape.bits == 4 else _pack_two_bits
        pack_slice(delta, i, into)
        into[f"scales{i}"].copy_(delta.scales.T)


def _pack_four_bits(delta: Delta, i: int, into: Mapping[str, torch.Tensor]) -> None:
    into[f"values{i}"].copy_(delta.values)
    half, masks = delta.shape.half, into[f"masks{i}"]
    paired = len(delta.indices) - half
    _translate(delta.indices[:paired], delta.indices[half:], _masks(), masks[:paired])
    if paired < half:  # an odd number of rows: the last row shares its bytes with no other
        masks[paired:] = _each_mask(_halves(delta.indices[paired:half]))


def _pack_two_bits(delta: Delta, i: int, into: Mapping[str, torch.Tensor]) -> None:
    _translate(delta.indices, delta.values, _codes(), into[f"values{i}"])


def _translate(low: torch.Tensor, high: torch.Tensor, table: torch.Tensor, into: torch.Tensor) -> None:
    """Translate pairs of bytes, one of `low` and one of `high` [rows, n], to [rows, 2n] bytes: `table` has
    two for each pair.
    """
    rows = max(1, TRANSLATED // low.shape[1])
    for start in range(0, len(low), rows):
        here = slice(start, start + rows)
        pairs = high[here].to(torch.int32)
        pairs <<= 8
        pairs |= low[here]
        torch.index_select(table, 0, pairs.view(-1), out=into[here].view(torch.int16).view(-1))


@functools.cache
def _masks() -> torch.Tensor:
    """int16 [65536]: for the indices of two rows, their masks in the same bytes."""
    low, high = _every_pair()
    return _two_bytes(_each_mask(_halves(low)) | _each_mask(_halves(high)) << 4)


@functools.cache
def _codes() -> torch.Tensor:
    """int16 [65536]: for indices and 2-bit values, the codes of all columns."""
    indices, values = _every_pair()
    kept, values = _halves(indices), _halves(values)
    first, second = 2 * (kept & 3), 2 * (kept >> 2)  # by how many bits each kept code moves up
    dropped = torch.full_like(kept, 0b01010101 * DROPPED)
    dropped &= ~((3 << first) | (3 << second))
    return _two_bytes(dropped | ((values & 3) << first) | ((values >> 2) << second))


def _every_pair() -> tuple[torch.Tensor, torch.Tensor]:
    """Low and high bytes of all 16-bit numbers, uint8 [65536, 1] each."""
    byte = torch.arange(256, dtype=torch.uint8)
    return byte.repeat(256).unsqueeze(1), byte.repeat_interleave(256).unsqueeze(1)


def _two_bytes(bytes_: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 2] as int16 [n]."""
    return bytes_.contiguous().view(torch.int16).flatten()


def _each_mask(kept: torch.Tensor) -> torch.Tensor:
    """i0 | i1 << 2 -> bits i0 and i1."""
    return (1 << (kept & 3)) | (1 << (kept >> 2))


def _halves(bytes_: torch.Tensor) -> torch.Tensor:
    """[outputs, n] bytes as [outputs, 2n] half bytes, the low one first."""
    return torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).flatten(1)
