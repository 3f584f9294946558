"""The layout of a sparse delta for sparse tensor cores: squares of 64 outputs x 64 columns.

A warp multiplies one square at a time (`sbmm.cu`), as four tiles of 16 outputs and two halves of 32 columns.
Each lane's codes and indices are adjacent, in the order of mma.sp.m16n8k32 (PTX ISA, "Matrix fragments for
sparse mma.m16n8k32"). Squares of a strip of 64 outputs follow one another by column. A square takes as many
bytes as in `layout.py`: bits / 2 + 1 bits per element.

Lane 4g + t (g < 8, t < 4) of a square holds 16 bytes of each array. With 4 bits it holds 32 bytes of codes;
those of tiles 2 and 3 follow all lanes' codes of tiles 0 and 1:

    codes    words m (tile) and half; register r = 2u + h of the product has both kept values of output
             16m + 8h + g and of the half's group 4u + t: with 4 bits nibbles r and r + 4 of word (m, half),
             with 2 bits those at bits 2 (4 half + r) and 16 more of word m
    indices  word m: of outputs 16m + g (low half) and 16m + g + 8 the i0 | i1 << 2 of four groups each, from
             group 4 (t % 2) of half t // 2 on
"""

from __future__ import annotations

import torch

SIDE = 64  # outputs and columns of a square
INDICES_BYTES = SIDE * SIDE // 8
OUTPUTS = (4, 2, 8)  # of a strip: m, h, g


def fits(inputs: int, outputs: int) -> bool:
    """Whether a matrix of this size can be cut into squares."""
    return inputs % SIDE == 0 and outputs % SIDE == 0


def square_bytes(bits: int) -> int:
    return SIDE * SIDE // 2 * bits // 8 + INDICES_BYTES


def unpack(squares: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """The dense delta, float32 [outputs, inputs]. `squares`: uint8 [strips, inputs / 64, square_bytes];
    `scales`: fp16 [scales, outputs], the scales of a strip in the order (g, m, h).
    """
    count, across = squares.shape[:2]
    split = squares.shape[2] - INDICES_BYTES
    values = (_four_bits_of if bits == 4 else _two_bits_of)(squares[..., :split], count, across)
    kept = squares[..., split:].reshape(count, across, 8, 2, 2, 4, 2, 2)
    kept = torch.stack((kept & 15, kept >> 4), dim=-1).permute(0, 5, 6, 2, 1, 3, 4, 7, 8)
    index = kept.reshape(*values.shape[:2]).long()  # [outputs, groups]
    found = values.new_zeros(*index.shape, 4)
    for value, at in enumerate((index & 3, index >> 2)):
        found.scatter_(2, at.unsqueeze(2), values[..., value : value + 1])
    by_scale = found.view(len(found), len(scales), -1)
    by_output = scales.view(-1, count, 8, 4, 2).permute(1, 3, 4, 2, 0).reshape(len(found), -1)
    delta: torch.Tensor = (by_scale * by_output.float()[:, :, None]).flatten(1)
    return delta


def _four_bits_of(codes: torch.Tensor, count: int, across: int) -> torch.Tensor:
    """[outputs, groups, 2]: codes less 8."""
    both = codes.reshape(count, across, 2, 8, 4, 2, 2, 2, 2)  # .., m // 2, g, t, m % 2, half, value, u
    nibbles = torch.stack((both & 15, both >> 4))  # h, strip, square, m // 2, g, t, m % 2, half, value, u
    ordered = nibbles.permute(1, 3, 6, 0, 4, 2, 7, 9, 5, 8)
    return ordered.reshape(count * SIDE, -1, 2).float() - 8


def _two_bits_of(codes: torch.Tensor, count: int, across: int) -> torch.Tensor:
    """[outputs, groups, 2]: codes less 2."""
    bytes_ = codes.reshape(count, across, 8, 4, 4, 2, 2)  # strip, square, g, t, m, value, half
    each = torch.stack([(bytes_ >> 2 * r) & 3 for r in range(4)]).unflatten(0, (2, 2))
    # u, h, strip, square, g, t, m, value, half
    ordered: torch.Tensor = each.permute(2, 6, 1, 4, 3, 8, 0, 5, 7)
    return ordered.reshape(count * SIDE, -1, 2).float() - 2
