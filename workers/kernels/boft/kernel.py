"""Rotations and scales on a GPU.

A factor mixes columns within 2^i b of one another. So a program takes one tile of rows, and a range of
columns that no factor of the adapter mixes with others. It applies all factors in turn. Block sizes and
numbers of factors are read from the table: one launch serves adapters of all kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workers.kernels.boft import few_rows
from workers.kernels.boft.layout import FIELDS
from workers.kernels.low_rank.kernel import dot
from workers.kernels.rows import SMALL_BLOCK, Rows

COPIED = 1024  # columns of a row without a rotation that one program copies
RESCALED = 1024
# Masks that depend on a number from the table end in `!= 0`: without it Triton's interpreter makes integers
# of them.


@triton.jit
def _column(position, block, factor):
    """`layout.positions`, for some positions."""
    half = tl.maximum(block // 2, 1)
    group = half * (2 << factor)
    within = position % group
    u = within // half
    moved = (u // 2 + (u % 2) * (1 << factor)) * half + within % half
    return tl.where(factor == 0, position, position - within + moved)


@triton.jit
def _source(x, x_stride, sums, sums_stride, rows, columns, mask, first):
    """The input of a factor, float32 [COLUMNS, ROWS]: `x` itself for the first factor, later the sums."""
    from_x = (mask & first) != 0
    of_x = tl.load(x + rows[None, :] * x_stride + columns[:, None], mask=from_x, other=0)
    of_sums = tl.load(sums + rows[None, :] * sums_stride + columns[:, None], mask=mask & ~from_x, other=0)
    return of_x.to(tl.float32) + of_sums


@triton.jit
def _copy(x, into, slots, table, x_stride, into_stride, num_rows, num_slices, start, size,
          WIDTH: tl.constexpr, FIELDS: tl.constexpr, COPIED: tl.constexpr, program):  # fmt: skip
    """Copy part of a row of a slice, unless its slot rotates it."""
    row = program % num_rows
    slice = (program // num_rows) % num_slices
    columns = (program // (num_rows * num_slices)) * COPIED + tl.arange(0, COPIED)
    slot = tl.load(slots + row)
    factors = tl.load(table + slot.to(tl.int64) * WIDTH + slice * FIELDS, mask=slot >= 0, other=0)
    mask = ((columns < size) & (factors == 0)) != 0
    values = tl.load(x + row.to(tl.int64) * x_stride + start + columns, mask=mask)
    tl.store(into + (slice * num_rows + row).to(tl.int64) * into_stride + columns, values, mask=mask)


@triton.jit
def _any(x, into, sums, blocks, order, begins, count, x_stride, into_stride, inputs, num_rows, slice,
         start, size, buffer_stride, begin, end, factors, block,
         ROWS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Rotate by blocks of any size and any number of factors; memory holds the sums between two factors."""
    valid = tl.arange(0, ROWS) < count
    rows = tl.load(order + begins + tl.arange(0, ROWS), mask=valid, other=0).to(tl.int64)
    of_slice = slice.to(tl.int64) * num_rows
    sums += of_slice * inputs
    for step in range(factors):
        factor = factors - 1 - step
        first = step == 0
        last = factor == 0
        # One factor's sums are read while the next one's are written: two buffers take turns.
        before = sums + ((step + 1) % 2) * buffer_stride
        after = sums + (step % 2) * buffer_stride
        of_factor = blocks + factor.to(tl.int64) * inputs * block
        for c in range(begin, end, TILE):
            position = c + tl.arange(0, TILE)
            column = _column(position, block, factor)
            mine = valid[None, :] & (position < end)[:, None]
            sum = _source(x, x_stride, before, inputs, rows, column, mine, first)
            if block % TILE == 0:
                # The tile lies in one block: its weights are loaded in rows of 16 bytes or more. (A hint on
                # `block` itself would also apply to the other branch.)
                wide = (block // TILE) * TILE
                inside = tl.multiple_of(c % wide, TILE)
                of_block = of_factor + (c // wide) * wide * wide
                for k in range(0, wide, TILE):
                    source = _column(c - inside + k + tl.arange(0, TILE), block, factor)
                    values = _source(x, x_stride, before, inputs, rows, source, valid[None, :], first)
                    at = (inside + tl.arange(0, TILE))[:, None] * wide + k + tl.arange(0, TILE)[None, :]
                    weights = tl.load(of_block + at)
                    sum = dot(weights, values.to(weights.dtype), sum)
            else:
                # Blocks of any size: the tile's blocks may contain columns outside a block; these are masked
                # to zero.
                first_k = (c // block) * block
                last_k = tl.minimum(tl.cdiv(c + TILE, block) * block, end)
                for k in range(first_k, last_k, TILE):
                    from_position = k + tl.arange(0, TILE)
                    source = _column(from_position, block, factor)
                    there = from_position < last_k
                    values = _source(
                        x, x_stride, before, inputs, rows, source, valid[None, :] & there[:, None], first
                    )
                    same = (from_position // block)[None, :] == (position // block)[:, None]
                    at = position[:, None] * block + (from_position % block)[None, :]
                    weights = tl.load(
                        of_factor + at, mask=same & there[None, :] & (position < end)[:, None], other=0
                    )
                    sum = dot(weights, values.to(weights.dtype), sum)
            tl.store(after + rows[None, :] * inputs + column[:, None], sum, mask=(mine & (factor != 0)) != 0)
            seen = (column >= start) & (column < start + size)
            tl.store(
                into + (of_slice + rows)[None, :] * into_stride + (column - start)[:, None],
                sum.to(into.dtype.element_ty),
                mask=(mine & seen[:, None] & last) != 0,
            )
        tl.debug_barrier()


# Numbers that take many values, or are 1 in some layers.
@triton.jit(do_not_specialize=["num_rows", "num_slices", "max_tiles", "stretches", "start", "buffer_stride"])
def _rotate(x, into, sums, arena, table, tiles, order, slots, x_stride, into_stride, inputs, num_rows,
            num_slices, max_tiles, stretches, start, size, buffer_stride,
            WIDTH: tl.constexpr, FIELDS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
            COLUMNS: tl.constexpr, COPIED: tl.constexpr, KINDS: tl.constexpr,
            FEW: tl.constexpr):  # fmt: skip
    program = tl.program_id(0)
    if program >= max_tiles * num_slices * stretches:
        _copy(x, into, slots, table, x_stride, into_stride, num_rows, num_slices, start, size,
              WIDTH, FIELDS, COPIED, program - max_tiles * num_slices * stretches)  # fmt: skip
        return
    tile = tiles + 3 * (program // (num_slices * stretches))
    slice = (program // stretches) % num_slices
    slot = tl.load(tile)
    if slot < 0:
        return
    first = tl.load(tile + 1)
    count = tl.load(tile + 2)
    fields = table + slot.to(tl.int64) * WIDTH + slice * FIELDS
    factors = tl.load(fields).to(tl.int32)
    if factors == 0:
        return
    block = tl.load(fields + 1).to(tl.int32)
    span = block << (factors - 1)
    unit = span * tl.cdiv(COLUMNS, span)
    begin = (start // unit + program % stretches) * unit
    if begin >= start + size:
        return
    end = tl.minimum(begin + unit, inputs)
    blocks = (arena + tl.multiple_of(tl.load(fields + 2), 128)).to(tl.pointer_type(x.dtype.element_ty))
    of_slice = into + slice.to(tl.int64) * num_rows * into_stride
    # Each usual size is compiled separately, for as many columns as have 16 KiB of blocks.
    kind = tl.where(factors < KINDS, block * KINDS + factors, 0)
    if FEW & (kind == 32 * KINDS + 1):
        few_rows.rotate(x, of_slice, blocks, order, first, count, x_stride, into_stride, inputs, start, size,
                        begin, end, 32, 1, 256)  # fmt: skip
    elif FEW & (kind == 32 * KINDS + 2):
        few_rows.rotate(x, of_slice, blocks, order, first, count, x_stride, into_stride, inputs, start, size,
                        begin, end, 32, 2, 128)  # fmt: skip
    elif FEW & (kind == 32 * KINDS + 3):
        few_rows.rotate(x, of_slice, blocks, order, first, count, x_stride, into_stride, inputs, start, size,
                        begin, end, 32, 3, 128)  # fmt: skip
    elif FEW & (kind == 16 * KINDS + 1):
        few_rows.rotate(x, of_slice, blocks, order, first, count, x_stride, into_stride, inputs, start, size,
                        begin, end, 16, 1, 256)  # fmt: skip
    elif FEW & (kind == 16 * KINDS + 2):
        few_rows.rotate(x, of_slice, blocks, order, first, count, x_stride, into_stride, inputs, start, size,
                        begin, end, 16, 2, 256)  # fmt: skip
    elif FEW & (kind == 64 * KINDS + 1):
        few_rows.rotate(x, of_slice, blocks, order, first, count, x_stride, into_stride, inputs, start, size,
                        begin, end, 64, 1, 128)  # fmt: skip
    elif FEW & (kind == 64 * KINDS + 2):
        few_rows.rotate(x, of_slice, blocks, order, first, count, x_stride, into_stride, inputs, start, size,
                        begin, end, 64, 2, 128)  # fmt: skip
    else:
        _any(x, into, sums, blocks, order, first, count, x_stride, into_stride, inputs, num_rows, slice,
             start, size, buffer_stride, begin, end, factors, block, ROWS, TILE)  # fmt: skip


@triton.jit
def _rescale(out, base_bias, arena, table, slots, out_stride, HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr,
             FIELDS: tl.constexpr, SLICES: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    part = tl.program_id(1)
    slice = 0
    offset = 0
    outputs = SLICES[0]
    for i in tl.static_range(len(SLICES) - 1):
        parts = (SLICES[i] + COLUMNS - 1) // COLUMNS
        if (slice == i) & (part >= parts):
            part -= parts
            slice = i + 1
            offset += SLICES[i]
            outputs = SLICES[i + 1]
    fields = table + slot * WIDTH + slice * FIELDS
    if tl.load(fields) == 0:
        return
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < outputs
    at = out + row.to(tl.int64) * out_stride + offset + columns
    result = tl.load(at, mask=mask, other=0).to(tl.float32)
    biased = (mask & (tl.load(fields + 4) != 0)) != 0
    if HAS_BIAS:
        base = tl.load(base_bias + offset + columns, mask=mask, other=0).to(tl.float32)
        result -= base
    scale = (arena + tl.multiple_of(tl.load(fields + 3), 128)).to(tl.pointer_type(tl.float32))
    result *= tl.load(scale + columns, mask=mask, other=0)
    bias = (arena + tl.multiple_of(tl.load(fields + 5), 128)).to(tl.pointer_type(tl.float32))
    result += tl.load(bias + columns, mask=biased, other=0)
    if HAS_BIAS:
        result += tl.where(biased, 0.0, base)  # only the product is scaled
    tl.store(at, result.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Config:
    """`columns`: the least number of input columns that a program rotates. `warps`, `stages` and `registers`
    (at most, per thread) are Triton's options.
    """

    columns: int
    warps: int
    stages: int = 2
    registers: int | None = None


def config_for(block: int) -> Config:
    # With 4 warps a large tile's sums do not fit into registers. For few rows, four programs fit at once.
    return Config(256, 4, registers=128) if block == SMALL_BLOCK else Config(64, 8)


def rotate(
    x: torch.Tensor,
    into: torch.Tensor,
    arena: torch.Tensor,
    table: torch.Tensor,
    rows: Rows,
    start: int = 0,
    max_factors: int = 2,
    config: Config | None = None,
) -> None:
    num_slices, num_rows, size = into.shape
    if num_rows == 0 or size == 0:
        return
    tiles = rows.tiles(num_rows)
    x, written = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, into))
    if written is not into or not into.is_contiguous():
        raise ValueError("expected contiguous memory for rotated inputs, got strided memory")
    # A range that begins before the window needs one more program.
    config = config or config_for(tiles.block)
    stretches = triton.cdiv(size, config.columns) + (start > 0)
    buffers = min(max_factors - 1, 2)
    sums = torch.empty((buffers, num_slices, num_rows, x.shape[1]), dtype=torch.float32, device=x.device)
    copies = num_rows * num_slices * triton.cdiv(size, COPIED)
    _rotate[(tiles.max_tiles * num_slices * stretches + copies,)](
        x,
        into,
        sums,
        arena,
        table,
        tiles.tiles,
        tiles.order,
        rows.slots(num_rows),
        x.stride(0),
        into.stride(1),
        x.shape[1],
        num_rows,
        num_slices,
        tiles.max_tiles,
        stretches,
        start,
        size,
        num_slices * num_rows * x.shape[1],
        WIDTH=table.shape[1],
        FIELDS=FIELDS,
        ROWS=tiles.block,
        TILE=32,
        COLUMNS=config.columns,
        COPIED=COPIED,
        KINDS=8,
        FEW=tiles.block == SMALL_BLOCK,
        num_warps=config.warps,
        num_stages=config.stages,
        maxnreg=config.registers,
    )


def rescale(
    out: torch.Tensor,
    base_bias: torch.Tensor | None,
    arena: torch.Tensor,
    table: torch.Tensor,
    rows: Rows,
    slices: Sequence[int],
) -> None:
    if len(out) == 0:
        return
    _rescale[(len(out), sum(triton.cdiv(outputs, RESCALED) for outputs in slices))](
        out,
        base_bias,
        arena,
        table,
        rows.slots(len(out)),
        out.stride(0),
        HAS_BIAS=base_bias is not None,
        WIDTH=table.shape[1],
        FIELDS=FIELDS,
        SLICES=tuple(slices),
        COLUMNS=RESCALED,
    )
