"""The layout of a singular-value delta's arrays (Delta-CoMe, Ping et al. 2024; DeltaMix's schedules of bits).

A delta is U V: V's rows are right singular vectors, U's columns left ones (stored as rows of U^T) with the
singular values multiplied in. Ranks are split in groups of 16, 8, 4, 3 or 2 bits; a weight is (code - zero) *
scale, with a scale and a zero point per 128 columns.

Codes and zero points are stored as their digits of two bits, so that only weights of two bits remain: sum_d
(4^d scale) (code_d - zero_d). The digits of a rank follow one another like separate ranks (8 bits are four
digits, 4 and 3 bits are two). Digits of 8 bits come first, then of 4 and 3, then of 2. Each digit needs its
own scale and zero point, and 3 bits take as much memory as 4. Delta-CoMe's schedules have few such ranks, and
a zero point here takes two bits where the format has eight, which compensates.

One side of a slice has, for digits D and panels of 128 columns:

- words, uint16 [panels, D, 16]: word i of a panel holds, at bits 2j and 2j + 1, the digit of column 16 j + i.
  So one shifted word is a plane of 16 adjacent columns, and decoding moves no data between threads;
- scales, float16 [panels, D], 4^d included;
- zeros, uint16 [panels / 8, D]: the zero points of eight panels, panel p's at bits 2 (p % 8) and the next.

A line of scales or zeros has room for a multiple of 16 digits; the unused part is 0.

Ranks of 16 bits are float16 [rank, columns], nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from workers.kernels.types import Part

HALF = 16
DIGITS = {8: 4, 4: 2, 3: 2, 2: 1}  # in the order in which they are stored
BITS = (HALF, *DIGITS)
GROUP = 128
PANEL = GROUP
PLANES, WORDS = 8, 16  # planes of WORDS columns in a panel
IN_WORD = 8  # digits of two bits in a word
LINE = 16  # lines of scales and of zero points are padded to a multiple of this
# A slice's inner products begin at a multiple of this; so do those of its ranks of 16 bits.
PLACES = 128
# The table's columns, per slice: digits, the end of the digits of ranks with four, the end of the digits of
# ranks with two, byte of V, byte of U. Then: ranks of 16 bits, byte of their V, byte of their U.
PER_SLICE = 8

_LOWEST = 0x0303030303030303  # the lowest digit of eight bytes at once


@dataclass(frozen=True)
class Matrix:
    """One matrix of a group: codes uint8 [rank, n] with scales and zeros, or float16 values [rank, n]."""

    values: torch.Tensor
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None


@dataclass(frozen=True)
class RankGroup:
    """Singular ranks that share a number of bits: V [rank, inputs] and U^T [rank, outputs]."""

    bits: int
    v: Matrix
    u: Matrix

    @property
    def rank(self) -> int:
        return self.v.values.shape[0]


Ranks = Mapping[int, int]  # rank by bits


@dataclass(frozen=True)
class Coded:
    """One side's digits, as views of the stored bytes."""

    words: torch.Tensor  # int16 [panels, D, WORDS]
    scales: torch.Tensor  # float16 [panels, D]
    zeros: torch.Tensor  # int16 [panels / 8, D]
    unused: tuple[torch.Tensor, ...]  # the unused ends of the lines of both

    def zero_points(self) -> torch.Tensor:
        """float32 [panels, D]."""
        shifts = 2 * torch.arange(IN_WORD, dtype=torch.int16, device=self.zeros.device)
        zeros = (self.zeros[:, None, :] >> shifts[:, None]) & 3
        return zeros.flatten(0, 1)[: len(self.words)].float()


def width(num_slices: int) -> int:
    """Columns of the table for a linear of `num_slices` slices."""
    return num_slices * PER_SLICE


def parts(inputs: int, slices: Sequence[int], ranks: Sequence[Ranks]) -> tuple[Part, ...]:
    """The arrays of one linear; an empty mapping means that the slice has no delta."""
    if len(slices) != len(ranks):
        raise ValueError(f"expected ranks for each of {len(slices)} slices, got ranks for {len(ranks)}")
    made = []
    for index, (outputs, by_bits) in enumerate(zip(slices, ranks, strict=True)):
        digits, halves = num_digits(by_bits), by_bits.get(HALF, 0)
        for side, columns in (("v", inputs), ("u", outputs)):
            if digits:
                made.append(Part(f"{side}{index}", torch.uint8, (coded_bytes(digits, columns),)))
            if halves:
                made.append(Part(f"{side}{index}.half", torch.float16, (halves, columns)))
    return tuple(made)


def pack(delta: Sequence[Sequence[RankGroup]], into: Mapping[str, torch.Tensor]) -> None:
    """Write one linear's rank groups, slice by slice, into views of the arena's parts."""
    for index, groups in enumerate(delta):
        for side in "vu":
            matrices = [(group.bits, group.v if side == "v" else group.u) for group in groups]
            matrices.sort(key=lambda each: BITS.index(each[0]))
            halves = [matrix for bits, matrix in matrices if bits == HALF]
            coded = [(bits, matrix) for bits, matrix in matrices if bits != HALF]
            if halves:
                _write_halves(halves, into[f"{side}{index}.half"])
            if coded:
                _write_coded(coded, into[f"{side}{index}"])


def describe(ranks: Sequence[Ranks], offsets: Mapping[str, int]) -> tuple[int, ...]:
    """The table's row for one linear whose parts lie at `offsets` (bytes) in the arena."""
    row: list[int] = []
    for index, by_bits in enumerate(ranks):
        four, two = (sum(_digits_of(by_bits, bits) for bits in some) for some in ((8,), (8, 4, 3)))
        row += [num_digits(by_bits), four, two, offsets.get(f"v{index}", 0), offsets.get(f"u{index}", 0)]
        row += [by_bits.get(HALF, 0), *(offsets.get(f"{side}{index}.half", 0) for side in "vu")]
    return tuple(row)


def ranks_of(delta: Sequence[Sequence[RankGroup]]) -> tuple[dict[int, int], ...]:
    """Each slice's rank by bits."""
    ranks = []
    for groups in delta:
        by_bits: dict[int, int] = {}
        for group in groups:
            by_bits[group.bits] = by_bits.get(group.bits, 0) + group.rank
        ranks.append(by_bits)
    return tuple(ranks)


def places(ranks: Sequence[Ranks]) -> int:
    """Places for a row's inner products in one linear: each digit of U has its own place."""
    counts = (count for by_bits in ranks for count in (num_digits(by_bits), by_bits.get(HALF, 0)))
    return sum(-(-count // PLACES) * PLACES for count in counts)


def num_digits(by_bits: Ranks) -> int:
    unknown = set(by_bits) - set(BITS)
    if unknown:
        raise ValueError(f"expected ranks with bits of {BITS}, got {sorted(unknown)}")
    return sum(_digits_of(by_bits, bits) for bits in DIGITS)


def coded_bytes(digits: int, columns: int) -> int:
    """Bytes of one side's digits."""
    return sum(_sizes(digits, columns))


def coded(stored: torch.Tensor, digits: int, columns: int) -> Coded:
    """One side's arrays, which lie one after the other in `stored` (uint8)."""
    words, scales, zeros = stored.split(_sizes(digits, columns))
    line = _line(digits)
    by_panel, by_eight = scales.view(torch.float16).view(-1, line), zeros.view(torch.int16).view(-1, line)
    return Coded(
        words.view(torch.int16).view(-1, digits, WORDS),
        by_panel[:, :digits],
        by_eight[:, :digits],
        (by_panel[:, digits:], by_eight[:, digits:]),
    )


def _sizes(digits: int, columns: int) -> list[int]:
    panels = -(-columns // PANEL)
    line = 2 * _line(digits)
    return [2 * WORDS * panels * digits, panels * line, -(-panels // IN_WORD) * line]


def _line(digits: int) -> int:
    return -(-digits // LINE) * LINE


def read(by_bits: Ranks, columns: int, stored: torch.Tensor) -> torch.Tensor:
    """float32 [rank, columns]: the coded ranks that `pack` wrote, dequantised, in the order of `DIGITS`."""
    digits = num_digits(by_bits)
    packed = coded(stored, digits, columns)
    shifts = 2 * torch.arange(PLANES, dtype=torch.int16, device=stored.device)
    codes = (packed.words[:, :, None, :] >> shifts[:, None]) & 3  # [panels, D, planes, words]
    less = codes.flatten(2).float() - packed.zero_points()[:, :, None]
    values = (less * packed.scales.float()[:, :, None]).transpose(0, 1).flatten(1)[:, :columns]
    ranks, start = [], 0
    for bits, count in DIGITS.items():
        taken = _digits_of(by_bits, bits)
        ranks.append(values[start : start + taken].view(-1, count, columns).sum(1))
        start += taken
    return torch.cat(ranks)


def _digits_of(by_bits: Ranks, bits: int) -> int:
    return by_bits.get(bits, 0) * DIGITS[bits]


def _write_halves(matrices: Sequence[Matrix], into: torch.Tensor) -> None:
    values = torch.cat([matrix.values for matrix in matrices])
    if values.shape != into.shape:
        raise ValueError(f"expected 16-bit values of shape {list(into.shape)}, got {list(values.shape)}")
    into.copy_(values)


def _write_coded(matrices: Sequence[tuple[int, Matrix]], into: torch.Tensor) -> None:
    columns = matrices[0][1].values.shape[1]
    digits = sum(DIGITS[bits] * matrix.values.shape[0] for bits, matrix in matrices)
    if into.numel() != coded_bytes(digits, columns):
        raise ValueError(
            f"expected {digits} digits of {columns} columns to take {into.numel()} bytes, got "
            f"{coded_bytes(digits, columns)}"
        )
    stored, start = coded(into, digits, columns), 0
    for rest in stored.unused:
        rest.zero_()
    for bits, matrix in matrices:
        end = start + DIGITS[bits] * matrix.values.shape[0]
        _write_group(bits, matrix, stored, slice(start, end))
        start = end


def _write_group(bits: int, matrix: Matrix, stored: Coded, place: slice) -> None:
    (rank, columns), scales, zeros = matrix.values.shape, matrix.scales, matrix.zeros
    panels = -(-columns // PANEL)
    if scales is None or zeros is None or scales.shape != (rank, panels) or zeros.shape != scales.shape:
        raise ValueError(f"expected scales and zeros of shape {(rank, panels)} for codes of {bits} bits")
    if columns == panels * PANEL:
        codes = matrix.values.contiguous()
    else:
        codes = torch.zeros(rank, panels * PANEL, dtype=torch.uint8)
        codes[:, :columns] = matrix.values
    eight = codes.view(torch.int64).view(rank, panels, PLANES, WORDS // 8)
    # the bits that no code may have
    most = torch.full((8,), 255 - (1 << bits) + 1, dtype=torch.uint8).view(torch.int64)
    if bits < 8 and (int(zeros.max()) >> bits or bool((eight & most).any())):
        raise ValueError(f"expected codes and zero points of {bits} bits, got a larger value")
    for digit in range(DIGITS[bits]):
        at = slice(place.start + digit, place.stop, DIGITS[bits])
        stored.words[:, at] = _words(eight, digit).transpose(0, 1)
        stored.scales[:, at] = scales.T * 4**digit
        digits = torch.nn.functional.pad(zeros >> 2 * digit & 3, (0, -panels % IN_WORD)).to(torch.int16)
        shifts = 2 * torch.arange(IN_WORD, dtype=torch.int16)
        stored.zeros[:, at] = (digits.unflatten(1, (-1, IN_WORD)) << shifts).sum(2, dtype=torch.int16).T
    if not bool(stored.scales[:, place].isfinite().all()):
        raise ValueError(f"expected finite scales for {bits} bits that fit a float16 digit, got others")


def _words(eight: torch.Tensor, digit: int) -> torch.Tensor:
    """int16 [rank, panels, WORDS] from codes [rank, panels, PLANES, WORDS], eight bytes at a time."""
    plane = [each >> 2 * digit & _LOWEST for each in eight.unbind(2)]
    low, high = (
        (plane[first] | plane[first + 1] << 2 | plane[first + 2] << 4 | plane[first + 3] << 6).view(
            torch.uint8
        )
        for first in (0, 4)
    )
    return torch.stack((low, high), -1).view(torch.int16)[..., 0]
