"""The common parts of the low-rank operations' Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(left, right, sums):
    if INTERPRETED:  # the interpreter multiplies bfloat16 as if its bits were integers
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, sums, input_precision="ieee")


@triton.jit
def tile_at(tiles_ptr, tile):
    """A tile's slot (-1: no tile), its first position in the order of rows, and its number of rows."""
    at = tiles_ptr + 3 * tile
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)
