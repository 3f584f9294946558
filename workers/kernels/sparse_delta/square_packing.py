"""Writes a delta's codes and indices into squares (see squares.py for where each goes), compiled: a delta has
gigabytes of them, and a cold start waits."""

from __future__ import annotations

from typing import Any

import torch

from profiler.compiled import compiled
from workers.kernels.sparse_delta.squares import OUTPUTS, SIDE

Bytes = Any  # numpy arrays of uint8


def pack(
    values: torch.Tensor,
    indices: torch.Tensor,
    scales: torch.Tensor,
    bits: int,
    into: torch.Tensor,
    scales_into: torch.Tensor,
) -> None:
    """Write a delta, as `layout.Delta` has it, to `into` and `scales_into`, as `squares.unpack` has them; on
    the host."""
    write = four_bits if bits == 4 else two_bits
    write(values.contiguous().numpy(), indices.contiguous().numpy(), into.numpy())
    count = len(into)
    by_output = scales.T.reshape(-1, count, *OUTPUTS)
    scales_into.view(-1, count, 8, 4, 2).copy_(by_output.permute(0, 1, 4, 2, 3))


@compiled
def four_bits(values: Bytes, indices: Bytes, into: Bytes) -> None:
    """`values` [outputs, inputs / 4], `indices` [outputs, inputs / 8] to `into` [strips, squares, 1536]."""
    for strip in range(into.shape[0]):
        for square in range(into.shape[1]):
            for m in range(4):
                for g in range(8):
                    row = strip * SIDE + m * 16 + g
                    word = (m >> 1) * 512 + g * 64 + (m & 1) * 8
                    for half in range(2):
                        column = square * 16 + half * 8
                        for t in range(4):
                            a, c = int(values[row, column + t]), int(values[row, column + 4 + t])
                            b, d = int(values[row + 8, column + t]), int(values[row + 8, column + 4 + t])
                            at = word + t * 16 + half * 4
                            into[strip, square, at] = (a & 15) | (b & 15) << 4
                            into[strip, square, at + 1] = (c & 15) | (d & 15) << 4
                            into[strip, square, at + 2] = a >> 4 | (b & 240)
                            into[strip, square, at + 3] = c >> 4 | (d & 240)
            _indices(indices, into, strip, square, 1024)


@compiled
def two_bits(values: Bytes, indices: Bytes, into: Bytes) -> None:
    """`values`, `indices` [outputs, inputs / 8] to `into` [strips, squares, 1024]."""
    for strip in range(into.shape[0]):
        for square in range(into.shape[1]):
            for m in range(4):
                for g in range(8):
                    row = strip * SIDE + m * 16 + g
                    for half in range(2):
                        column = square * 8 + half * 4  # of bytes, two groups each
                        for t in range(4):
                            byte, up = column + (t >> 1), 4 * (t & 1)
                            a, c = int(values[row, byte]) >> up, int(values[row, byte + 2]) >> up
                            b, d = int(values[row + 8, byte]) >> up, int(values[row + 8, byte + 2]) >> up
                            at = g * 64 + t * 16 + m * 4 + half
                            into[strip, square, at] = _four_codes(a, b, c, d)
                            into[strip, square, at + 2] = _four_codes(a >> 2, b >> 2, c >> 2, d >> 2)
            _indices(indices, into, strip, square, 512)


@compiled
def _four_codes(a: int, b: int, c: int, d: int) -> int:
    return (a & 3) | (b & 3) << 2 | (c & 3) << 4 | (d & 3) << 6


@compiled
def _indices(indices: Bytes, into: Bytes, strip: int, square: int, start: int) -> None:
    for m in range(4):
        for g in range(8):
            for quarter in range(4):  # of the square's columns: half and pair
                at = start + g * 64 + quarter * 16 + m * 4
                for h in range(2):
                    row = strip * SIDE + m * 16 + h * 8 + g
                    for byte in range(2):
                        into[strip, square, at + h * 2 + byte] = indices[row, square * 8 + quarter * 2 + byte]
