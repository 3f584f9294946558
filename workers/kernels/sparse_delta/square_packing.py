"""Writes a delta's codes and indices into squares (see squares.py for their places).

It is compiled, since a delta has gigabytes of codes and a cold start waits for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from profiler.compiled import compiled
from workers.kernels.sparse_delta.squares import OUTPUTS, SIDE

Words = Any  # numpy arrays: the input of uint64, the output of uint32
Word = np.uint64

_EACH = 0x0001_0001_0001_0001  # times a mask of 16 bits: that mask in each 16 of a word's 64 bits
_LOW_NIBBLES, _HIGH_NIBBLES = np.uint64(_EACH * 0x0F0F), np.uint64(_EACH * 0xF0F0)
_LOW_PAIRS, _HIGH_PAIRS = np.uint64(_EACH * 0x3333), np.uint64(_EACH * 0xCCCC)
_EVEN_BYTES, _EVEN_16S = np.uint64(_EACH * 0x00FF), np.uint64(0x0000_FFFF_0000_FFFF)
_LOW_WORD, _LOW_16 = np.uint64(0xFFFF_FFFF), np.uint64(0xFFFF)
_2, _4, _8, _16, _32 = (np.uint64(bits) for bits in (2, 4, 8, 16, 32))


def pack(
    values: torch.Tensor,
    indices: torch.Tensor,
    scales: torch.Tensor,
    bits: int,
    into: torch.Tensor,
    scales_into: torch.Tensor,
) -> None:
    """Write a delta, as in `layout.Delta`, to `into` and `scales_into` on the host, as in
    `squares.unpack`.
    """
    write = four_bits if bits == 4 else two_bits
    write(_words(values), _words(indices), into.numpy().view(np.uint32))
    count = len(into)
    by_output = scales.T.reshape(-1, count, *OUTPUTS)
    scales_into.view(-1, count, 8, 4, 2).copy_(by_output.permute(0, 1, 4, 2, 3))


def _words(matrix: torch.Tensor) -> Words:
    """A matrix as words; its rows have whole words.

    If its memory begins within a word, the matrix is copied first.
    """
    whole = matrix.contiguous()
    return (whole if whole.data_ptr() % 8 == 0 else whole.clone()).numpy().view(np.uint64)


@compiled
def four_bits(values: Words, indices: Words, into: Words) -> None:
    """`values` [outputs, inputs / 32], `indices` [outputs, inputs / 64] to `into` [strips, squares, 384]."""
    for strip in range(into.shape[0]):
        for tiles in range(2):  # two of the four
            for g in range(8):
                first, begin = strip * SIDE + tiles * 32 + g, tiles * 128 + g * 16
                for square in range(into.shape[1]):
                    words = into[strip, square, begin : begin + 16]
                    for tile in range(2):
                        row, above = values[first + tile * 16], values[first + tile * 16 + 8]
                        for half in range(2):
                            _four_bit_words(
                                row[square * 2 + half], above[square * 2 + half], words[tile * 2 + half :]
                            )
        _indices(indices, into[strip], strip * SIDE, 256)


@compiled
def two_bits(values: Words, indices: Words, into: Words) -> None:
    """`values`, `indices` [outputs, inputs / 64] to `into` [strips, squares, 256]."""
    for strip in range(into.shape[0]):
        for g in range(8):
            for square in range(into.shape[1]):
                words = into[strip, square, g * 16 : g * 16 + 16]
                for tile in range(4):
                    row = strip * SIDE + tile * 16 + g
                    _two_bit_words(values[row, square], values[row + 8, square], words[tile:])
        _indices(indices, into[strip], strip * SIDE, 128)


@compiled
def _four_bit_words(of_g: Word, of_g_8: Word, words: Words) -> None:
    """Write the codes of a tile's half, of outputs g and g + 8. Byte t of each half of the word belongs to
    pair t.
    """
    _byte_by_byte(
        (of_g & _LOW_NIBBLES) | (of_g_8 & _LOW_NIBBLES) << _4,
        (of_g >> _4 & _LOW_NIBBLES) | (of_g_8 & _HIGH_NIBBLES),
        words,
    )


@compiled
def _two_bit_words(of_g: Word, of_g_8: Word, words: Words) -> None:
    """Write the codes of a tile, of outputs g and g + 8. Each half of the word belongs to one half of the
    tile; nibbles t and t + 4 in it belong to pair t.
    """
    _byte_by_byte(
        _nibbles_joined((of_g & _LOW_PAIRS) | (of_g_8 & _LOW_PAIRS) << _2),
        _nibbles_joined((of_g >> _2 & _LOW_PAIRS) | (of_g_8 & _HIGH_PAIRS)),
        words,
    )


@compiled
def _nibbles_joined(word: Word) -> Word:
    """Join nibbles in each half of the word: byte t gets nibbles t and t + 4."""
    return _nibbles_apart(word & _EVEN_16S) | _nibbles_apart(word >> _16 & _EVEN_16S) << _4


@compiled
def _nibbles_apart(word: Word) -> Word:
    """Spread nibbles in each half of the word: byte t gets nibble t."""
    by_two = (word | word << _8) & _EVEN_BYTES
    return (by_two | by_two << _4) & _LOW_NIBBLES


@compiled
def _byte_by_byte(first: Word, second: Word, words: Words) -> None:
    """Combine byte t of both halves of both words into `words[4 * t]`."""
    even = _alternating(first & _EVEN_BYTES), _alternating(second & _EVEN_BYTES)
    odd = _alternating(first >> _8 & _EVEN_BYTES), _alternating(second >> _8 & _EVEN_BYTES)
    words[0], words[8] = _low_16s(*even), _high_16s(*even)
    words[4], words[12] = _low_16s(*odd), _high_16s(*odd)


@compiled
def _alternating(word: Word) -> Word:
    """Alternate bytes 0 and 2 of the low half with those of the high half; all other bytes are 0."""
    return (word | word >> _32 << _8) & _LOW_WORD


@compiled
def _low_16s(first: Word, second: Word) -> Word:
    return (first & _LOW_16) | (second & _LOW_16) << _16


@compiled
def _high_16s(first: Word, second: Word) -> Word:
    return (first >> _16 & _LOW_16) | (second >> _16 & _LOW_16) << _16


@compiled
def _indices(indices: Words, squares: Words, first: int, start: int) -> None:
    """Write the indices of a strip whose outputs begin at `first`.

    In the 16 words of each g, word 4 * quarter + m has a quarter's two bytes of output 16m + g, and of 16m +
    g + 8.
    """
    for g in range(8):
        for square in range(squares.shape[0]):
            words = squares[square, start + g * 16 : start + g * 16 + 16]
            for tile in range(4):
                row = first + tile * 16 + g
                low, high = indices[row, square], indices[row + 8, square]
                words[tile], words[4 + tile] = _low_16s(low, high), _high_16s(low, high)
                low, high = low >> _32, high >> _32
                words[8 + tile], words[12 + tile] = _low_16s(low, high), _high_16s(low, high)
