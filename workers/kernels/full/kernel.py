"""Replaced tensors on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workers.kernels.full.layout import WIDTH
from workers.kernels.rows import SMALL_BLOCK, Rows, batch_invariant

COPIED = 1024  # columns of an embedding that a program copies
ADDED = 4096  # numbers of a difference that a program adds


@triton.jit
def _tensor(arena, table, slot, WIDTH: tl.constexpr, like):
    """The number of rows of the slot's tensor, and its address."""
    fields = table + slot.to(tl.int64) * WIDTH
    at = arena + tl.multiple_of(tl.load(fields + 1), 128)
    return tl.load(fields), at.to(tl.pointer_type(like.dtype.element_ty))


@triton.jit
def _difference(arena, table, slot, WIDTH: tl.constexpr):
    """Whether the slot's tensor is a difference, and the addresses of its codes and scales."""
    fields = table + slot.to(tl.int64) * WIDTH
    codes = arena + tl.multiple_of(tl.load(fields + 1), 128)
    offset = tl.load(fields + 2)
    scales = arena + tl.multiple_of(offset, 128)
    return offset != 0, codes.to(tl.pointer_type(tl.int8)), scales.to(tl.pointer_type(tl.float32))


@triton.jit
def _norm(source, out, epsilon, arena, table, slots, source_stride, out_stride, width,
          ZERO_CENTRED: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    count, weight = _tensor(arena, table, slot, WIDTH, out)
    if count == 0:
        return
    columns = tl.arange(0, COLUMNS)
    mask = columns < width
    x = tl.load(source + row * source_stride + columns, mask=mask, other=0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x) / width + epsilon)
    factors = tl.load(weight + columns, mask=mask, other=0).to(tl.float32)
    if ZERO_CENTRED:
        x *= 1 + factors
    else:  # rounded before the weight is applied, as the base's norms do
        x = x.to(out.dtype.element_ty).to(tl.float32) * factors
    tl.store(out + row * out_stride + columns, x.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _embed(ids, out, first, arena, table, slots, out_stride, width,
           WIDTH: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    count, weight = _tensor(arena, table, slot, WIDTH, out)
    local = tl.load(ids + row).to(tl.int64) - first
    if (local < 0) | (local >= count):
        return
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < width
    to = out + row * out_stride + columns
    differs, codes, scales = _difference(arena, table, slot, WIDTH)
    if differs:
        change = tl.load(codes + local * width + columns, mask=mask).to(tl.float32) * tl.load(scales + local)
        tl.store(to, (tl.load(to, mask=mask).to(tl.float32) + change).to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(to, tl.load(weight + local * width + columns, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["max_tiles"])  # it takes many values
def _head(x, out, arena, table, tiles, order, x_stride, out_stride, inputs, max_tiles, WIDTH: tl.constexpr,
          ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, CODES: tl.constexpr):  # fmt: skip
    # Tiles come first: tiles of one slot run together and read its weights from memory once.
    tile = tiles + 3 * (tl.program_id(0) % max_tiles)
    slot = tl.load(tile)
    if slot < 0:
        return
    count, weight = _tensor(arena, table, slot, WIDTH, x)
    outputs = (tl.program_id(0) // max_tiles) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = outputs < count
    valid = tl.arange(0, ROWS) < tl.load(tile + 2)
    rows = tl.load(order + tl.load(tile + 1) + tl.arange(0, ROWS), mask=valid, other=0).to(tl.int64)
    to = out + rows[None, :] * out_stride + outputs[:, None]
    mask = inside[:, None] & valid[None, :]
    differs, codes, scales = _difference(arena, table, slot, WIDTH)
    if differs:
        sum = _product(codes, outputs, inside, x, rows, valid, x_stride, inputs, ROWS, OUTPUTS, CODES)
        sum *= tl.load(scales + outputs, mask=inside, other=0)[:, None]
        sum += tl.load(to, mask=mask, other=0).to(tl.float32)
        tl.store(to, sum.to(out.dtype.element_ty), mask=mask)
    else:
        sum = _product(weight, outputs, inside, x, rows, valid, x_stride, inputs, ROWS, OUTPUTS, INPUTS)
        tl.store(to, sum.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _product(weight, outputs, inside, x, rows, valid, x_stride, inputs,
             ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr):  # fmt: skip
    """The product of some rows of a weight with some rows of x: float32 [OUTPUTS, ROWS]."""
    sum = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for k in tl.range(0, inputs, INPUTS):
        columns = k + tl.arange(0, INPUTS)
        real = columns < inputs
        weights = tl.load(
            weight + outputs.to(tl.int64)[:, None] * inputs + columns[None, :],
            mask=inside[:, None] & real[None, :],
            other=0,
        )
        values = tl.load(
            x + rows[None, :] * x_stride + columns[:, None], mask=real[:, None] & valid[None, :], other=0
        )
        sum = tl.dot(weights.to(x.dtype.element_ty), values, sum, input_precision="ieee")
    return sum


@triton.jit
def _add(base, codes, scales, out, width, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < width
    at = row * width + columns
    change = tl.load(codes + at, mask=mask).to(tl.float32) * tl.load(scales + row)
    total = tl.load(base + at, mask=mask).to(tl.float32) + change
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


def norm(
    source: torch.Tensor,
    out: torch.Tensor,
    epsilon: float,
    arena: torch.Tensor,
    table: torch.Tensor,
    rows: Rows,
    zero_centred: bool = False,
) -> None:
    if len(out) == 0:
        return
    width = out.shape[1]
    _norm[(len(out),)](
        source,
        out,
        epsilon,
        arena,
        table,
        rows.slots(len(out)),
        source.stride(0),
        out.stride(0),
        width,
        ZERO_CENTRED=zero_centred,
        WIDTH=WIDTH,
        COLUMNS=triton.next_power_of_2(width),
        num_warps=4 if width <= 4096 else 8,
    )


def embed(
    ids: torch.Tensor, out: torch.Tensor, first: int, arena: torch.Tensor, table: torch.Tensor, rows: Rows
) -> None:
    if len(out) == 0:
        return
    width = out.shape[1]
    _embed[(len(out), triton.cdiv(width, COPIED))](
        ids,
        out,
        first,
        arena,
        table,
        rows.slots(len(out)),
        out.stride(0),
        width,
        WIDTH=WIDTH,
        COLUMNS=COPIED,
    )


def head(x: torch.Tensor, out: torch.Tensor, arena: torch.Tensor, table: torch.Tensor, rows: Rows) -> None:
    if len(x) == 0:
        return
    # In batch-invariant mode tiles are always small: a row's result may not depend on the other rows.
    tiles = rows.tiles_by_count(len(x))[0] if batch_invariant() else rows.tiles(len(x))
    small = tiles.block == SMALL_BLOCK
    outputs, wide = (32 if small else 128), x.element_size() > 2
    _head[(tiles.max_tiles * triton.cdiv(out.shape[1], outputs),)](
        x,
        out,
        arena,
        table,
        tiles.tiles,
        tiles.order,
        x.stride(0),
        out.stride(0),
        x.shape[1],
        tiles.max_tiles,
        WIDTH=WIDTH,
        ROWS=tiles.block,
        OUTPUTS=outputs,
        INPUTS=(128 if wide else 256) if small else 64,
        CODES=(128 if wide else 256) if small else 128,
        num_warps=4,
        num_stages=3,
    )


def add(base: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    if not base.numel():
        return
    rows, width = base.shape
    _add[(rows, triton.cdiv(width, ADDED))](
        base, codes, scales, out, width, COLUMNS=min(ADDED, triton.next_power_of_2(width)), num_warps=8
    )
