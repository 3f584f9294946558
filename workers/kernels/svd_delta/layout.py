"""Where a singular-value delta's arrays lie (Delta-CoMe, Ping et al. 2024; DeltaMix's schedules of bits).

A delta is U V: V's rows are right singular vectors, U's columns left ones (stored as rows of U^T) with the
singular values folded in. Ranks are split in groups of 16, 8, 4, 3 or 2 bits. Either matrix of a group is
[rank, columns] and is stored in the same way:

- codes of 2 bits in panels of 256 columns: uint16 word i of a rank's panel holds, at bits 2j and 2j + 1,
  the code of column 32 j + i. So one word shifted is a plane of 32 adjacent columns, and decoding moves
  nothing between threads. [digits, panels, rank, 32]; 4 bits are two such digits, 8 bits are four;
- the third bit of 3-bit codes: word i holds, at bit 2j + h, that of column 32 j + 16 h + i.
  [panels, rank, 16];
- scales, float16 [groups, rank], and zeros, uint8 [groups, rank], one per 128 columns:
  the weight is (code - zero) * scale;
- 16 bits: float16 [rank, columns], nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from workers.kernels.types import Part

BITS = (16, 8, 4, 3, 2)  # the order of a slice's groups in tables and in memory
DIGITS = {8: 4, 4: 2, 3: 1, 2: 1}
GROUP = 128
PANEL = 256
PLANES, WORDS = 8, 32  # planes of WORDS columns in a panel
RANK_BLOCK = 32  # ranks that one program handles; a group's inner products take whole blocks
PER_GROUP = 3  # columns of the table: rank, bytes to V, bytes to U


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


def width(num_slices: int) -> int:
    """Columns of the table for a linear of `num_slices` slices."""
    return num_slices * len(BITS) * PER_GROUP


def parts(inputs: int, slices: Sequence[int], ranks: Sequence[Ranks]) -> tuple[Part, ...]:
    """What is stored for one linear; an empty mapping means that the slice has no delta."""
    if len(slices) != len(ranks):
        raise ValueError(f"Ranks of {len(ranks)} slices were given for {len(slices)} slices.")
    found = []
    for index, (outputs, by_bits) in enumerate(zip(slices, ranks, strict=True)):
        for bits in _present(by_bits):
            for side, columns in (("v", inputs), ("u", outputs)):
                size = _sizes(bits, by_bits[bits], columns).total
                found.append(Part(_name(side, index, bits), torch.uint8, (size,)))
    return tuple(found)


def pack(delta: Sequence[Sequence[RankGroup]], into: Mapping[str, torch.Tensor]) -> None:
    """Write one linear's rank groups, slice by slice, into views of the arena's parts."""
    for index, groups in enumerate(delta):
        for group in groups:
            _write(group.bits, group.v, into[_name("v", index, group.bits)])
            _write(group.bits, group.u, into[_name("u", index, group.bits)])


def describe(ranks: Sequence[Ranks], offsets: Mapping[str, int]) -> tuple[int, ...]:
    """The table's row for one linear whose parts lie at `offsets` (bytes) in the arena."""
    row = []
    for index, by_bits in enumerate(ranks):
        for bits in BITS:
            rank = by_bits.get(bits, 0)
            at = [offsets[_name(side, index, bits)] if rank else 0 for side in "vu"]
            row += [rank, *at]
    return tuple(row)


def ranks_of(delta: Sequence[Sequence[RankGroup]]) -> tuple[dict[int, int], ...]:
    """Each slice's rank by bits."""
    found = []
    for groups in delta:
        by_bits = {group.bits: group.rank for group in groups}
        if len(by_bits) != len(groups):
            raise ValueError("Two rank groups of one slice have the same bits; join them.")
        found.append(by_bits)
    return tuple(found)


def padded_rank(ranks: Sequence[Ranks]) -> int:
    """Room for one row's inner products: every group's rank in whole blocks."""
    return sum(-(-rank // RANK_BLOCK) * RANK_BLOCK for by_bits in ranks for rank in by_bits.values())


def read(bits: int, rank: int, columns: int, stored: torch.Tensor) -> torch.Tensor:
    """float32 [rank, columns]: what `pack` wrote, dequantised."""
    if bits == 16:
        return stored.view(torch.float16).view(rank, columns).float()
    words, high, scales, zeros = arrays(bits, rank, columns, stored)
    codes = torch.zeros(rank, -(-columns // PANEL) * PANEL, dtype=torch.int32, device=stored.device)
    for index, digit in enumerate(words.view(torch.int16).view(DIGITS[bits], -1, rank, WORDS)):
        codes += _planes(digit, 2) << 2 * index
    if bits == 3:
        codes = codes + (_planes(high.view(torch.int16).view(-1, rank, WORDS // 2), 1) << 2)
    groups = -(-columns // GROUP)
    padded = torch.zeros(rank, groups * GROUP, device=stored.device)
    used = min(codes.shape[1], padded.shape[1])
    padded[:, :used] = codes[:, :used]
    by_group = padded.view(rank, groups, GROUP)
    scale = scales.view(torch.float16).view(groups, rank).float().T[:, :, None]
    zero = zeros.view(groups, rank).float().T[:, :, None]
    return ((by_group - zero) * scale).view(rank, -1)[:, :columns]


def arrays(bits: int, rank: int, columns: int, stored: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Words, third bits, scales and zeros of a coded matrix, as bytes."""
    sizes = _sizes(bits, rank, columns)
    words, high, scales, zeros = stored.split([sizes.words, sizes.high, sizes.scales, sizes.zeros])
    return words, high, scales, zeros


def size_bytes(bits: int, rank: int, columns: int) -> int:
    """Bytes of one matrix of a group."""
    return _sizes(bits, rank, columns).total


@dataclass(frozen=True)
class _Sizes:
    words: int
    high: int
    scales: int
    zeros: int

    @property
    def total(self) -> int:
        return self.words + self.high + self.scales + self.zeros


def _sizes(bits: int, rank: int, columns: int) -> _Sizes:
    """Bytes of one matrix's arrays, which lie one after the other."""
    if bits == 16:
        return _Sizes(2 * rank * columns, 0, 0, 0)
    panels, groups = -(-columns // PANEL), -(-columns // GROUP)
    high = panels * rank * WORDS if bits == 3 else 0
    return _Sizes(2 * DIGITS[bits] * panels * rank * WORDS, high, 2 * groups * rank, groups * rank)


def _write(bits: int, matrix: Matrix, into: torch.Tensor) -> None:
    rank, columns = matrix.values.shape
    sizes = _sizes(bits, rank, columns)
    if into.numel() != sizes.total:
        raise ValueError(
            f"A matrix of {rank} ranks and {columns} columns at {bits} bits takes {sizes.total} bytes; "
            f"room was made for {into.numel()}."
        )
    if bits == 16:
        into.view(torch.float16).view(rank, columns).copy_(matrix.values)
        return
    scales, zeros = matrix.scales, matrix.zeros
    groups = -(-columns // GROUP)
    if scales is None or zeros is None or scales.shape != (rank, groups) or zeros.shape != scales.shape:
        raise ValueError(f"Codes of {bits} bits need scales and zeros of shape {(rank, groups)}.")
    if max(int(matrix.values.max()), int(zeros.max())) >= 1 << bits:
        raise ValueError(f"A code or zero point does not fit into {bits} bits.")
    panels = -(-columns // PANEL)
    codes = torch.zeros(rank, panels * PANEL, dtype=torch.int32)
    codes[:, :columns] = matrix.values
    words, high, scales_at, zeros_at = arrays(bits, rank, columns, into)
    digits = words.view(torch.int16).view(DIGITS[bits], panels, rank, WORDS)
    for index in range(DIGITS[bits]):
        digits[index] = _words(codes >> 2 * index & 3, 2)
    if bits == 3:
        high.view(torch.int16).view(panels, rank, WORDS // 2).copy_(_words(codes >> 2, 1))
    scales_at.view(torch.float16).view(groups, rank).copy_(scales.T)
    zeros_at.view(groups, rank).copy_(zeros.T)


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int16 [panels, rank, words] from codes int32 [rank, columns], each of `bits` bits."""
    in_word = 16 // bits
    planes = codes.view(codes.shape[0], -1, in_word, PANEL // in_word)  # [rank, panels, planes, words]
    shifts = bits * torch.arange(in_word, dtype=torch.int32)[:, None]
    words = (planes << shifts).sum(2, dtype=torch.int32)
    return words.view(torch.int16)[..., ::2].transpose(0, 1)  # the lower half of each


def _planes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `_words`."""
    in_word = 16 // bits
    shifts = bits * torch.arange(in_word, dtype=torch.int32, device=words.device)[:, None]
    planes = words.to(torch.int32)[:, :, None, :] >> shifts & (1 << bits) - 1  # [panels, rank, planes, words]
    return planes.transpose(0, 1).reshape(words.shape[1], -1)


def _present(by_bits: Ranks) -> list[int]:
    unknown = set(by_bits) - set(BITS)
    if unknown:
        raise ValueError(f"Ranks of {sorted(unknown)} bits; expected bits of {BITS}.")
    return [bits for bits in BITS if by_bits.get(bits, 0)]


def _name(side: str, index: int, bits: int) -> str:
    return f"{side}{index}.{bits}"
