"""The compiled part of copying: a job is a `Copy` as a record."""

from __future__ import annotations

from typing import Any

import numpy as np

from profiler.compiled import Records, compiled
from profiler.variants.finite import EXPONENTS, first_with_all

F16, BF16, F32 = range(3)
JOB = np.dtype(
    [
        *((name, np.int64) for name in ("source", "source_type", "values", "width", "first_row", "rows")),
        *((name, np.int64) for name in ("first_column", "columns", "into", "into_type", "stride")),
        ("scaling", np.float32),
        ("transposed", np.bool_),
    ],
    align=True,
)
EXPONENT_F16, EXPONENT_BF16, EXPONENT_F32 = (EXPONENTS[name][1] for name in ("F16", "BF16", "F32"))
BLOCK = 64  # rows that are transposed together: their values stay in the processor's cache
TWO_TO_112 = np.float32(2.0**112)  # a half's exponent counts from 15, a float's from 127

Array = Any  # of numpy; in the compiled functions below: words of 16 and 32 bits, and floats


@compiled
def copy(
    jobs: Records,
    halves: Array,
    words: Array,
    into_halves: Array,
    into_words: Array,
    own: tuple[Array, Array, Array],
) -> tuple[int, int]:
    """Run the jobs; returns (job, value) of the first value that is not finite, or (-1, -1).

    `halves` and `words` are views of one memory; so are `into_halves` and `into_words`, and the three arrays
    of `own`, which is working memory (floats, words, halves).
    """
    floats, bits, _ = own
    for number in range(len(jobs)):
        job = jobs[number]
        at = _not_finite(job, halves, words)
        if at >= 0:
            return number, at
        if job.transposed and _in_pairs(job):
            _pairs_turned_over(job, words, into_halves, into_words, own)
        elif job.transposed:
            _turned_over(job, halves, words, into_halves, into_words, floats, bits)
        elif _as_they_are(job):
            _copy_lines(job, halves, into_halves)
        else:
            _as_it_lies(job, halves, words, into_halves, into_words, floats, bits)
    return -1, -1


@compiled
def _as_it_lies(
    job: Records,
    halves: Array,
    words: Array,
    into_halves: Array,
    into_words: Array,
    floats: Array,
    bits: Array,
) -> None:
    value = 4 if job.into_type == F32 else 2
    line = slice(0, job.columns)
    for row in range(job.rows):
        _read(job, row, halves, words, floats[line], bits[line])
        _scale(floats[line], job.scaling)
        _write_line(job.into_type, job.into + row * job.stride * value, bits[line], into_halves, into_words)


@compiled
def _turned_over(
    job: Records,
    halves: Array,
    words: Array,
    into_halves: Array,
    into_words: Array,
    floats: Array,
    bits: Array,
) -> None:
    """Transpose BLOCK rows at a time: write each as a column of [columns, BLOCK], then write that array's
    rows.
    """
    value, columns = 4 if job.into_type == F32 else 2, job.columns
    line, turned = slice(0, columns), bits[columns:]
    for first in range(0, job.rows, BLOCK):
        count = min(BLOCK, job.rows - first)
        for row in range(count):
            _read(job, first + row, halves, words, floats[line], bits[line])
            _scale(floats[line], job.scaling)
            _spread(bits[line], turned[row:])
        for column in range(columns):
            at = job.into + (column * job.stride + first) * value
            begin = column * BLOCK
            _write_line(job.into_type, at, turned[begin : begin + count], into_halves, into_words)


@compiled
def _as_they_are(job: Records) -> bool:
    """Whether the job copies halves without changing a value."""
    return bool(job.source_type == job.into_type and job.source_type != F32 and job.scaling == 1.0)


@compiled
def _copy_lines(job: Records, halves: Array, into_halves: Array) -> None:
    for row in range(job.rows):
        begin = job.source // 2 + (job.first_row + row) * job.width + job.first_column
        into = job.into // 2 + row * job.stride
        _copy_values(halves[begin : begin + job.columns], into_halves[into : into + job.columns])


@compiled
def _in_pairs(job: Records) -> bool:
    """Whether two values of a row are one aligned word of 32 bits, and the number of rows is even, too."""
    odd = job.width | job.first_column | job.columns | job.rows
    return bool(job.source_type != F32 and odd % 2 == 0 and job.source % 4 == 0)


@compiled
def _pairs_turned_over(
    job: Records,
    words: Array,
    into_halves: Array,
    into_words: Array,
    own: tuple[Array, Array, Array],
) -> None:
    """Do the same as `_turned_over`, but faster.

    First transpose squares of two by two halves, then convert them to floats, BLOCK values of a column at a
    time.
    """
    floats, bits, bit_halves = own
    value, pairs, lines = 4 if job.into_type == F32 else 2, job.columns // 2, BLOCK // 2
    turned, spare = bits[: job.columns * lines], slice(job.columns * lines, job.columns * lines + BLOCK)
    for first in range(0, job.rows, BLOCK):
        count = min(BLOCK, job.rows - first)
        at = job.source // 4 + ((job.first_row + first) * job.width + job.first_column) // 2
        for pair in range(pairs):
            both = slice(2 * pair * lines, (2 * pair + 2) * lines)
            _turn_over(words[at + pair :], job.width // 2, count // 2, turned[both])
        for column in range(job.columns):
            begin = column * BLOCK
            line, into = bit_halves[begin : begin + count], job.into + (column * job.stride + first) * value
            if _as_they_are(job):
                _copy_values(line, into_halves[into // 2 : into // 2 + count])
                continue
            column_floats, column_bits = floats[spare][:count], bits[spare][:count]
            _widen(job.source_type, line, column_floats, column_bits)
            _scale(column_floats, job.scaling)
            _write_line(job.into_type, into, column_bits, into_halves, into_words)


@compiled
def _turn_over(words: Array, stride: int, count: int, into: Array) -> None:
    """Split 2 * `count` pairs of halves, `stride` words apart, into two columns: [2, BLOCK / 2] words."""
    low, high = np.uint32(0xFFFF), np.uint32(16)
    for i in range(count):
        above, below = words[2 * i * stride], words[(2 * i + 1) * stride]
        into[i] = (above & low) | (below << high)
        into[BLOCK // 2 + i] = (above >> high) | (below & ~low)


@compiled
def _spread(line: Array, into: Array) -> None:
    for i in range(len(line)):
        into[i * BLOCK] = line[i]


@compiled
def _not_finite(job: Records, halves: Array, words: Array) -> int:
    """The first value of a job's matrix that is not finite, or -1."""
    if job.source_type == F32:
        begin = job.source // 4
        return first_with_all(words[begin : begin + job.values], EXPONENT_F32)
    begin = job.source // 2
    mask = EXPONENT_F16 if job.source_type == F16 else EXPONENT_BF16
    return first_with_all(halves[begin : begin + job.values], mask)


@compiled
def _read(job: Records, row: int, halves: Array, words: Array, floats: Array, bits: Array) -> None:
    """Read a row's columns as floats."""
    begin = (job.first_row + row) * job.width + job.first_column
    if job.source_type == F32:
        begin += job.source // 4
        _copy_values(words[begin : begin + job.columns], bits)
        return
    begin += job.source // 2
    _widen(job.source_type, halves[begin : begin + job.columns], floats, bits)


@compiled
def _widen(source_type: int, line: Array, floats: Array, bits: Array) -> None:
    if source_type == BF16:
        _from_bfloats(line, bits)
    else:
        _from_halves(line, floats, bits)


@compiled
def _copy_values(line: Array, bits: Array) -> None:
    for i in range(len(line)):
        bits[i] = line[i]


@compiled
def _from_bfloats(line: Array, bits: Array) -> None:
    for i in range(len(line)):
        bits[i] = np.uint32(line[i]) << np.uint32(16)


@compiled
def _from_halves(line: Array, floats: Array, bits: Array) -> None:
    for i in range(len(line)):
        half = np.uint32(line[i])
        bits[i] = (half & np.uint32(0x8000)) << np.uint32(16) | (half & np.uint32(0x7FFF)) << np.uint32(13)
    for i in range(len(line)):
        floats[i] *= TWO_TO_112


@compiled
def _scale(floats: Array, by: float) -> None:
    for i in range(len(floats)):
        floats[i] *= by


@compiled
def _write_line(into_type: int, into: int, bits: Array, into_halves: Array, into_words: Array) -> None:
    """Convert floats to values of `into_type`, which follow one another from byte `into` on."""
    if into_type == F32:
        begin = into // 4
        _copy_values(bits, into_words[begin : begin + len(bits)])
        return
    begin = into // 2
    line = into_halves[begin : begin + len(bits)]
    if into_type == BF16:
        _to_bfloats(bits, line)
    else:
        _to_halves(bits, line)


@compiled
def _to_bfloats(bits: Array, line: Array) -> None:
    for i in range(len(line)):
        word = bits[i]
        line[i] = (word + np.uint32(0x7FFF) + (word >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)


@compiled
def _to_halves(bits: Array, line: Array) -> None:
    for i in range(len(line)):
        line[i] = half_of(bits[i])


@compiled
def half_of(word: int) -> int:
    """The bits of the half nearest to a finite float, given its bits; ties go to the even half."""
    sign, size = word >> 16 & 0x8000, word & 0x7FFFFFFF
    if size >= 0x47800000:  # 2^16: infinity
        return sign | 0x7C00
    if size >= 0x38800000:  # 2^-14: a half of full precision; a value that rounds up to 2^16 is infinity, too
        return sign | (size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13
    shift = 126 - (size >> 23)
    if shift > 24:  # less than half of the smallest half
        return sign
    digits = (size & 0x7FFFFF) | 0x800000
    kept, lost, tie = digits >> shift, digits & (1 << shift) - 1, 1 << (shift - 1)
    return sign | kept + (lost > tie or (lost == tie and kept & 1 == 1))
