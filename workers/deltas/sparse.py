"""2:4 sparse coding of a matrix with 4 or 2 bits per kept value (DeltaZip, section 4.2).

Two of every four columns are kept. A kept value is a code q with value (q - 2^(bits-1)) * scale. A scale
serves a row, or `group_size` columns of it. Here it is 2 max|d| / (2^bits - 1), rounded to float16 before the
codes are chosen; `workers/compression` chooses both for a layer's inputs. For 2 bits the grid {-2, -1, 0, 1}
is lopsided: +max is clamped to two thirds of itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BITS = (4, 2)


@dataclass(frozen=True)
class SparseCode:
    """A coded matrix [out, in], as it is stored.

    `values` uint8 [out, in/4] (4 bits) or [out, in/8] (2 bits), `indices` uint8 [out, in/8], `scales`
    float16 [out, in/group_size].
    """

    values: torch.Tensor
    indices: torch.Tensor
    scales: torch.Tensor
    bits: int


def encode(matrix: torch.Tensor, bits: int, group_size: int | None = None) -> SparseCode:
    """Prune by magnitude, round to nearest. `group_size` None: one scale per row.

    Raises ValueError if `in` does not divide by 8 and by the group size, for other bit widths, or if a value
    is not finite or too large for a float16 scale.
    """
    check(matrix, bits, group_size)
    matrix = matrix.float()
    positions = largest_two(matrix.abs())
    kept = _by(matrix, 4).gather(2, _by(positions, 2).long()).flatten(1)
    scales = scales_of(kept, bits, group_size)
    return pack(codes_of(kept, scales, bits), positions, scales, bits)


def largest_two(importance: torch.Tensor) -> torch.Tensor:
    """uint8 [out, in/2]: the positions (0..3, ascending) of the two largest of every four columns.

    Between equal columns, the earlier is taken.
    """
    a, b, c, d = _by(importance, 4).unbind(2)
    pairs = ((a, b), (a, c), (a, d), (b, c), (b, d), (c, d))
    ab, ac, ad, bc, bd, cd = ((left >= right).to(torch.uint8) for left, right in pairs)  # 1: the left wins
    lost = (3 - ab - ac - ad, 2 + ab - bc - bd, 1 + ac + bc - cd, ad + bd + cd)
    kept = [losses < 2 for losses in lost]
    first = torch.where(kept[0], 0, torch.where(kept[1], 1, 2))
    second = torch.where(kept[3], 3, torch.where(kept[2], 2, 1))
    return torch.stack((first, second), dim=2).to(torch.uint8).flatten(1)


def scales_of(kept: torch.Tensor, bits: int, group_size: int | None) -> torch.Tensor:
    """float16 [out, G] for kept values [out, in/2]; a group of zeros has scale 0. Raises ValueError."""
    groups = kept.unsqueeze(1) if group_size is None else _by(kept, group_size // 2)
    scales: torch.Tensor = (groups.abs().amax(dim=2) * (2 / (2**bits - 1))).half()
    if not bool(scales.isfinite().all()):
        raise ValueError(
            "expected finite differences below 98000, got larger differences; check both checkpoints"
        )
    return scales


def codes_of(kept: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes [out, in/2] of kept values [out, in/2], rounded to nearest."""
    wide = scales.float().repeat_interleave(kept.shape[1] // scales.shape[1], dim=1)
    steps = torch.where(wide > 0, kept / wide, 0.0)
    codes: torch.Tensor = (steps.round() + 2 ** (bits - 1)).clamp(0, 2**bits - 1).to(torch.uint8)
    return codes


def pack(codes: torch.Tensor, positions: torch.Tensor, scales: torch.Tensor, bits: int) -> SparseCode:
    """From codes and positions, uint8 [out, in/2] each, to the stored bytes."""
    indices = _join(_join(positions, 2), 4)
    values = _join(codes, 4) if bits == 4 else _join(_join(codes, 2), 4)
    return SparseCode(values, indices, scales.half(), bits)


def unpack(code: SparseCode) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and positions, uint8 [out, in/2] each: the inverse of `pack`."""
    codes = _split(code.values, 4) if code.bits == 4 else _split(_split(code.values, 4), 2)
    return codes, _split(_split(code.indices, 4), 2)


def decode(code: SparseCode) -> torch.Tensor:
    """The matrix, float32 [out, in]."""
    codes, positions = unpack(code)
    scales = code.scales.float().repeat_interleave(codes.shape[1] // code.scales.shape[1], dim=1)
    kept = (codes.float() - 2 ** (code.bits - 1)) * scales
    matrix = torch.zeros(codes.shape[0], codes.shape[1] // 2, 4, device=codes.device)
    return matrix.scatter(2, _by(positions, 2).long(), _by(kept, 2)).flatten(1)


def _by(matrix: torch.Tensor, size: int) -> torch.Tensor:
    """[rows, n] as [rows, n/size, size]."""
    return matrix.reshape(matrix.shape[0], -1, size)


def _join(small: torch.Tensor, width: int) -> torch.Tensor:
    """Join two neighbours of `width` bits into one number, the first one lowest."""
    return small[:, ::2] | (small[:, 1::2] << width)


def _split(joined: torch.Tensor, width: int) -> torch.Tensor:
    low = joined & (2**width - 1)
    return torch.stack((low, joined >> width), dim=2).flatten(1)


def check(matrix: torch.Tensor, bits: int, group_size: int | None) -> None:
    """Raises ValueError unless a matrix of this shape can be coded with these options."""
    into = matrix.shape[1]
    if bits not in BITS:
        raise ValueError(f"expected 4 or 2 bits, got {bits}")
    if into % 8:
        raise ValueError(f"expected a multiple of 8 columns, got {into}; this layer has no 2:4 form")
    if group_size is not None and (group_size < 8 or group_size % 8 or into % group_size):
        raise ValueError(f"expected groups of a multiple of 8 that divides {into} columns, got {group_size}")
