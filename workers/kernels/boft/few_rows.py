"""Rotations by blocks of the usual sizes, for tiles of few rows, where reading the blocks is the bottleneck.

A program holds the blocks of some columns, of all factors, in its registers, and rotates one row after the
other. The order of summation does not depend on the number of rows, so a row's result is the same in every
batch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _blocks(blocks, c, end, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """[CHUNK / BLOCK, outputs, inputs] of the blocks from column c on; zeros from `end` on."""
    which = tl.arange(0, CHUNK // BLOCK)[:, None, None]
    j = tl.arange(0, BLOCK)[None, :, None]
    k = tl.arange(0, BLOCK)[None, None, :]
    at = blocks + c * BLOCK + (which * BLOCK + j) * BLOCK + k
    # This step reads these weights only once, so they leave the cache first.
    return tl.load(at, mask=c + which * BLOCK < end, other=0, eviction_policy="evict_first")


@triton.jit
def _turned(value, weights, FACTOR: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Apply one factor to some columns: float32 [CHUNK / BLOCK, BLOCK]. Before the factor, halves of blocks
    change places as in `layout.positions`; after it they go back.
    """
    COUNT: tl.constexpr = CHUNK // BLOCK
    if FACTOR == 0:
        return value + tl.sum(value[:, None, :] * weights.to(tl.float32), axis=2)
    GROUPS: tl.constexpr = CHUNK // (BLOCK << FACTOR)
    BLOCKS: tl.constexpr = 1 << FACTOR
    HALF: tl.constexpr = BLOCK // 2
    halves = tl.permute(tl.reshape(value, (GROUPS, 2, BLOCKS, HALF)), (0, 2, 1, 3))
    placed = tl.reshape(halves, (COUNT, BLOCK))
    change = tl.sum(placed[:, None, :] * weights.to(tl.float32), axis=2)
    back = tl.permute(tl.reshape(change, (GROUPS, BLOCKS, 2, HALF)), (0, 2, 1, 3))
    return value + tl.reshape(back, (COUNT, BLOCK))


@triton.jit
def rotate(x, into, blocks, order, first, count, x_stride, into_stride, inputs, start, size, begin, end,
           BLOCK: tl.constexpr, FACTORS: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Rotate columns [begin, end) of rows `order[first : first + count]`; no factor mixes them with other
    columns. `into`: this slice's rotated input, from column `start` on.
    """
    column = tl.arange(0, CHUNK // BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    for c in range(begin, end, CHUNK):
        last = _blocks(blocks, c, end, BLOCK, CHUNK)
        if FACTORS >= 2:
            before = _blocks(blocks + inputs * BLOCK, c, end, BLOCK, CHUNK)
        if FACTORS >= 3:
            first_of_all = _blocks(blocks + 2 * inputs * BLOCK, c, end, BLOCK, CHUNK)
        here = c + column
        seen = (here < end) & (here >= start) & (here < start + size)
        for r in range(count):
            row = tl.load(order + first + r).to(tl.int64)
            value = tl.load(x + row * x_stride + here, mask=here < end, other=0).to(tl.float32)
            if FACTORS >= 3:
                value = _turned(value, first_of_all, 2, BLOCK, CHUNK)
            if FACTORS >= 2:
                value = _turned(value, before, 1, BLOCK, CHUNK)
            value = _turned(value, last, 0, BLOCK, CHUNK)
            tl.store(into + row * into_stride + here - start, value.to(into.dtype.element_ty), mask=seen)
