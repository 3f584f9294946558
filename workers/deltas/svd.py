"""Low-rank coding with mixed precision: large singular values get more bits (Delta-CoMe; DeltaMix).

delta = U diag(s) V, truncated; diag(s) is multiplied into U. Rows of V and of (U diag(s))^T are coded in
groups of 128 values: w = (q - z) * s, with s in float16 and z in uint8. Codes of a row are one little-endian
bit stream; eight codes of b bits take b bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

GROUP = 128
BITS = (16, 8, 4, 3, 2)
DELTA_COME = ((8, 2), (3, 32))  # (bits, ranks); 2 bits for all ranks that fit the rest of the budget
REST_BITS = 2


@dataclass(frozen=True)
class FactorCode:
    """Coded rows [rank, n]. `codes` uint8 [rank, ceil(n/8) * bits], `scales` float16 and `zeros` uint8
    [rank, ceil(n/128)]; with 16 bits float16 [rank, n] and None."""

    codes: torch.Tensor
    scales: torch.Tensor | None
    zeros: torch.Tensor | None


@dataclass(frozen=True)
class GroupCode:
    """Successive ranks of one width: V [rank, in] and (U diag(s))^T [rank, out]."""

    bits: int
    rank: int
    v: FactorCode
    u: FactorCode


def default_groups(shape: tuple[int, int], budget: float = 1 / 16) -> tuple[tuple[int, int], ...]:
    """(bits, ranks) for a matrix [out, in] whose codes take at most `budget` of its size in float16.

    8 bits for 2 ranks, 3 for the next 32, 2 for the rest, as in Delta-CoMe, which also counts only codes:
    scales and zeros add 3/16 bit per code, about 9%. Raises ValueError if not one rank fits.
    """
    out, into = shape
    bits_left = int(budget * 16 * out * into / (out + into))
    ranks_left, groups = min(shape), []
    for bits, wanted in (*DELTA_COME, (REST_BITS, ranks_left)):
        rank = min(wanted, ranks_left, bits_left // bits)
        if rank > 0:
            groups.append((bits, rank))
            bits_left, ranks_left = bits_left - bits * rank, ranks_left - rank
    if not groups:
        raise ValueError(
            f"a budget of {budget:g} leaves no rank for a matrix of {out} x {into}; raise the budget"
        )
    return tuple(groups)


def encode(matrix: torch.Tensor, groups: Sequence[tuple[int, int]]) -> tuple[GroupCode, ...]:
    """Truncated SVD of [out, in], rounded to nearest. Raises ValueError for values that are not finite."""
    if not bool(matrix.isfinite().all()):
        raise ValueError("expected finite differences, got NaN or infinity; check both checkpoints")
    u, s, v = torch.linalg.svd(matrix.float(), full_matrices=False)
    scaled, coded, at = (u * s).T, [], 0
    for bits, rank in groups:
        rows = slice(at, at + rank)
        coded.append(GroupCode(bits, rank, encode_rows(v[rows], bits), encode_rows(scaled[rows], bits)))
        at += rank
    return tuple(coded)


def decode(groups: Sequence[GroupCode], shape: tuple[int, int]) -> torch.Tensor:
    """The matrix, float32 [out, in]."""
    out, into = shape
    matrix = torch.zeros(shape, device=groups[0].v.codes.device if groups else None)
    for group in groups:
        v = decode_rows(group.v, group.bits, into)
        matrix.addmm_(decode_rows(group.u, group.bits, out).T, v)
    return matrix


def encode_rows(rows: torch.Tensor, bits: int) -> FactorCode:
    """Code [rank, n]. The range of a group always includes 0, so that zero stays zero. Raises ValueError."""
    if bits == 16:
        return FactorCode(_half(rows).contiguous(), None, None)
    grouped = _by(_pad(rows, GROUP), GROUP)
    low, high = grouped.amin(dim=2).clamp(max=0), grouped.amax(dim=2).clamp(min=0)
    top = 2**bits - 1
    scales = _half_above((high - low) / top)
    wide = scales.float()
    zeros = torch.where(wide > 0, -low / wide, 0.0).round().clamp(0, top)
    steps = torch.where(wide.unsqueeze(2) > 0, grouped / wide.unsqueeze(2), 0.0).round()
    codes = (steps + zeros.unsqueeze(2)).clamp(0, top).to(torch.uint8).flatten(1)[:, : rows.shape[1]]
    return FactorCode(pack_bits(codes, bits), scales, zeros.to(torch.uint8))


def decode_rows(code: FactorCode, bits: int, n: int) -> torch.Tensor:
    """float32 [rank, n]."""
    if code.scales is None or code.zeros is None:
        return code.codes.float()
    steps = unpack_bits(code.codes, bits, n).float()
    scales, zeros = (t.float().repeat_interleave(GROUP, dim=1)[:, :n] for t in (code.scales, code.zeros))
    return (steps - zeros) * scales


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [rows, n] below 2^bits to a little-endian bit stream, uint8 [rows, ceil(n/8) * bits]."""
    padded = _pad(codes, 8)
    if bits == 8:
        return padded.contiguous()
    eights = _by(padded, 8).long()
    words: torch.Tensor = (eights << (torch.arange(8, device=codes.device) * bits)).sum(dim=2, keepdim=True)
    pieces: torch.Tensor = (words >> (torch.arange(bits, device=codes.device) * 8)) & 255
    return pieces.to(torch.uint8).flatten(1)


def unpack_bits(stream: torch.Tensor, bits: int, n: int) -> torch.Tensor:
    """The inverse of `pack_bits`: uint8 [rows, n]."""
    if bits == 8:
        return stream[:, :n]
    pieces = _by(stream, bits).long()
    words = (pieces << (torch.arange(bits, device=stream.device) * 8)).sum(dim=2, keepdim=True)
    codes: torch.Tensor = (words >> (torch.arange(8, device=stream.device) * bits)) & (2**bits - 1)
    return codes.to(torch.uint8).flatten(1)[:, :n]


def _by(rows: torch.Tensor, size: int) -> torch.Tensor:
    """[rows, n] as [rows, n/size, size]."""
    return rows.reshape(rows.shape[0], -1, size)


def _pad(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Zeros at the end of each row up to a multiple of `size`."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % size))


def _half_above(numbers: torch.Tensor) -> torch.Tensor:
    """The nearest float16 that is not smaller, for numbers >= 0: a smaller scale would clip the extremes."""
    half = numbers.half()
    above = (half.view(torch.int16) + 1).view(torch.float16)
    return _half(torch.where(half.float() < numbers, above, half))


def _half(numbers: torch.Tensor) -> torch.Tensor:
    half = numbers.half()
    if not bool(half.isfinite().all()):
        raise ValueError("singular vectors exceed float16; the difference is too large for a delta")
    return half
