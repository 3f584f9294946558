"""Singular-value deltas in two Triton launches for all variants, slices and bits of a batch.

All weights of a slice but its ranks of 16 bits are digits of two bits, so one loop serves all other bits.
A program's warps do not share a product: they are the batch dimension of a three-dimensional one. Where
tiles of rows are small, each warp takes its part of the inner dimension, and their sums meet at the end, in
an order that depends on shapes alone; where tiles are large, each warp takes 16 of the tile's rows.

Weights are the left operand of the tensor cores: words of codes stay as they are up to registers, and two
instructions turn two codes into two bfloat16 numbers code - zero. Scales belong to 128 columns of one rank,
so shrink applies them to the products of a panel, and expand to its other operand.
Grids depend on shapes alone: a captured CUDA graph stays valid for every later batch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from workers.kernels import low_rank
from workers.kernels.low_rank.kernel import dot, tile_at
from workers.kernels.rows import Tiles
from workers.kernels.svd_delta import layout
from workers.kernels.svd_delta.plan import MOST_SLICES, Plan, Scratch

_PER_SLICE = tl.constexpr(layout.PER_SLICE)
_WORDS = tl.constexpr(layout.WORDS)
_PANEL = tl.constexpr(layout.PANEL)
_IN_WORD = tl.constexpr(layout.IN_WORD)
_SLICES = tl.constexpr(MOST_SLICES)
_RANKS = tl.constexpr(layout.PLACES)  # digits, or ranks of 16 bits, that a warp takes at a time
_ROWS = tl.constexpr(16)  # rows of the batch that a warp takes
REGISTERS = 128
# Numbers become bfloat16 by way of float32 throughout: the interpreter knows no other way.


@triton.jit
def _digit(words, zero, PLANE: tl.constexpr, QUICK: tl.constexpr, DTYPE: tl.constexpr):
    """DTYPE: the words' digits number PLANE, less their zero points (float32, of a shape to broadcast).

    The bits of 128.0 with a digit in the lowest are the bfloat16 128 + digit; two and four bits up they are
    128 + 4 digit and 128 + 16 digit, so three planes need no shift but another factor.
    """
    if QUICK:
        if PLANE >= 6:
            words = _shifted(_shifted(words))
        elif PLANE >= 3:
            words = _shifted(words)
        if PLANE % 3 == 0:
            found = tl.inline_asm_elementwise(
                "{ .reg .b32 t, f; lop3.b32 t, $1, 0x00030003, 0x43004300, 0xEA;"
                " mov.b32 f, 0x3F803F80; fma.rn.bf16x2 $0, t, f, $2; }",
                "=r,r,r", [words, (-128.0 - zero).to(tl.bfloat16)], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        elif PLANE % 3 == 1:
            found = tl.inline_asm_elementwise(
                "{ .reg .b32 t, f; lop3.b32 t, $1, 0x000C000C, 0x43004300, 0xEA;"
                " mov.b32 f, 0x3E803E80; fma.rn.bf16x2 $0, t, f, $2; }",
                "=r,r,r", [words, (-32.0 - zero).to(tl.bfloat16)], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            found = tl.inline_asm_elementwise(
                "{ .reg .b32 t, f; lop3.b32 t, $1, 0x00300030, 0x43004300, 0xEA;"
                " mov.b32 f, 0x3D803D80; fma.rn.bf16x2 $0, t, f, $2; }",
                "=r,r,r", [words, (-8.0 - zero).to(tl.bfloat16)], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
    else:
        found = (((words >> 2 * PLANE) & 3).to(tl.float32) - zero).to(DTYPE)
    return found


@triton.jit
def _shifted(words):
    """Three planes further in the lower bits; what comes in from the neighbour is above those looked at."""
    return tl.inline_asm_elementwise(
        "shr.b32 $0, $1, 6;", "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2
    )


@triton.jit
def _slices(described, num_slices):
    """[SLICES]: digits, ranks of 16 bits, and the blocks of RANKS that each of them take."""
    s = tl.arange(0, _SLICES)
    digits = tl.load(described + _PER_SLICE * s, mask=s < num_slices, other=0).to(tl.int32)
    halves = tl.load(described + _PER_SLICE * s + 5, mask=s < num_slices, other=0).to(tl.int32)
    return digits, halves, (digits + _RANKS - 1) // _RANKS, (halves + _RANKS - 1) // _RANKS


@triton.jit
def _at(values, index):
    return tl.sum(tl.where(tl.arange(0, _SLICES) == index, values, 0))


@triton.jit
def _before(values, index):
    return tl.sum(tl.where(tl.arange(0, _SLICES) < index, values, 0))


@triton.jit
def _warp_rows(order_ptr, first, count, WARPS: tl.constexpr, SPLIT: tl.constexpr):
    """[WARPS, ROWS]: the rows of the batch that each warp takes, and which there are."""
    m = tl.arange(0, _ROWS)[None, :]
    g = tl.arange(0, WARPS)[:, None]
    m = m + 0 * g if SPLIT else m + _ROWS * g
    here = m < count
    return tl.load(order_ptr + first + m, mask=here, other=0).to(tl.int64), here


@triton.jit
def _scales(scales_ptr, zeros_ptr, panel, panels, r, digits):
    """[panels given, digits given]: scales and the words that zero points are in."""
    known = (panel < panels)[:, None] & (r < digits)[None, :]
    scale = tl.load(scales_ptr + panel[:, None] * digits + r[None, :], mask=known, other=0.0)
    zero = tl.load(zeros_ptr + (panel // _IN_WORD)[:, None] * digits + r[None, :], mask=known, other=0)
    return scale, zero


@triton.jit
def _shrink_digits(x_at, here, v_ptr, digits, start, inputs, WARPS: tl.constexpr, SPLIT: tl.constexpr,
                   QUICK: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """[WARPS, RANKS, ROWS]: V x^T."""
    dtype = x_at.dtype.element_ty
    panels = (inputs + _PANEL - 1) // _PANEL
    words_ptr = v_ptr.to(tl.pointer_type(tl.int16))
    scales_ptr = words_ptr.to(tl.pointer_type(tl.float16)) + panels * digits * _WORDS
    zeros_ptr = words_ptr + panels * digits * (_WORDS + 1)
    r = start + tl.arange(0, _RANKS)
    g = tl.arange(0, WARPS)
    i = tl.arange(0, _WORDS)
    sums = tl.zeros((WARPS, _RANKS, _ROWS), tl.float32)
    stride: tl.constexpr = WARPS if SPLIT else 1
    mine = g if SPLIT else 0 * g
    next_scale, next_zero = _scales(scales_ptr, zeros_ptr, mine, panels, r, digits)
    for start_panel in tl.range(0, panels, stride, num_stages=STAGES):
        panel = start_panel + mine
        known = (panel < panels)[:, None] & (r < digits)[None, :]
        at = panel[:, None] * digits + r[None, :]
        words = tl.load(
            words_ptr + (at * _WORDS)[:, :, None] + i[None, None, :], mask=known[:, :, None], other=0
        )
        scale = next_scale.to(tl.float32)
        zero = ((next_zero >> (2 * (panel % _IN_WORD)).to(tl.int16)[:, None]) & 3).to(tl.float32)[:, :, None]
        # One step ahead: the pipeliner moves none but the operands of products.
        next_scale, next_zero = _scales(scales_ptr, zeros_ptr, panel + stride, panels, r, digits)
        products = tl.zeros((WARPS, _RANKS, _ROWS), tl.float32)
        for plane in tl.static_range(8):
            column = panel[:, None] * _PANEL + plane * _WORDS + i[None, :]
            x = tl.load(
                x_at[:, None, :] + column[:, :, None],
                mask=(column < inputs)[:, :, None] & here[:, None, :],
                other=0.0,
            )
            products = dot(_digit(words, zero, plane, QUICK, dtype), x, products)
        sums += products * scale[:, :, None]
    return sums


@triton.jit
def _shrink_halves(x_at, here, v_ptr, halves, first, inputs, WARPS: tl.constexpr, SPLIT: tl.constexpr,
                   STAGES: tl.constexpr):  # fmt: skip
    """[WARPS, RANKS, ROWS]: V x^T."""
    dtype = x_at.dtype.element_ty
    values = v_ptr.to(tl.pointer_type(tl.float16))
    r = first + tl.arange(0, _RANKS)
    g = tl.arange(0, WARPS)
    i = tl.arange(0, _WORDS)
    sums = tl.zeros((WARPS, _RANKS, _ROWS), tl.float32)
    stride: tl.constexpr = _WORDS * WARPS if SPLIT else _WORDS
    mine = _WORDS * g if SPLIT else 0 * g
    for start in tl.range(0, inputs, stride, num_stages=2):
        column = start + mine[:, None] + i[None, :]
        inside = column < inputs
        v = tl.load(
            values + (r.to(tl.int64) * inputs)[None, :, None] + column[:, None, :],
            mask=(r < halves)[None, :, None] & inside[:, None, :],
            other=0.0,
        )
        x = tl.load(
            x_at[:, None, :] + column[:, :, None], mask=inside[:, :, None] & here[:, None, :], other=0.0
        )
        sums = dot(v.to(tl.float32).to(dtype), x, sums)
    return sums


@triton.jit
def _store(at, here, sums, four, two, start, LANES: tl.constexpr):
    """Store [LANES, RANKS, ROWS] inner products from digit `start` on; of ranks with several, their sum."""
    r = start + tl.arange(0, _RANKS)
    mask = (r >= two)[None, :, None] & here[:, None, :]  # zeros past the last: expand reads whole blocks
    tl.store(at[:, None, :] + r[None, :, None], sums, mask=mask)
    if start < two:
        pairs = tl.sum(tl.reshape(sums, (LANES, _RANKS // 2, 2, _ROWS)), axis=2)
        of_pair = start + 2 * tl.arange(0, _RANKS // 2)
        pair_mask = ((of_pair >= four) & (of_pair < two))[None, :, None] & here[:, None, :]
        for digit in tl.static_range(2):
            tl.store(at[:, None, :] + (of_pair + digit)[None, :, None], pairs, mask=pair_mask)
        quads = tl.sum(tl.reshape(pairs, (LANES, _RANKS // 4, 2, _ROWS)), axis=2)
        of_quad = start + 4 * tl.arange(0, _RANKS // 4)
        quad_mask = (of_quad < four)[None, :, None] & here[:, None, :]
        for digit in tl.static_range(4):
            tl.store(at[:, None, :] + (of_quad + digit)[None, :, None], quads, mask=quad_mask)


@triton.jit(do_not_specialize=["num_slices"])
def _shrink(
    x_ptr,
    arena_ptr,
    table_ptr,
    tiles_ptr,
    order_ptr,
    shrunk_ptr,  # float32 [T, places]
    inputs,
    x_stride,
    places,
    num_slices,
    WARPS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    QUICK: tl.constexpr,
    PDL: tl.constexpr,
):
    block = tl.program_id(0)
    tile = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot, first, count = tile_at(tiles_ptr, tile)
    if slot < 0:
        return
    described = table_ptr + slot.to(tl.int64) * num_slices * _PER_SLICE
    digits, halves, coded_blocks, half_blocks = _slices(described, num_slices)
    blocks = coded_blocks + half_blocks
    # Slices do not share blocks, nor do digits and ranks of 16 bits.
    index = tl.sum((tl.cumsum(blocks) <= block).to(tl.int32))
    if index >= num_slices:
        return
    row, here = _warp_rows(order_ptr, first, count, WARPS, SPLIT)
    x_at = x_ptr + row * x_stride
    fields = described + _PER_SLICE * index
    start = (block - _before(blocks, index)) * _RANKS
    coded = start < _at(coded_blocks, index) * _RANKS
    place = block * _RANKS - start
    if coded:
        count_here = _at(digits, index)
        four = tl.load(fields + 1).to(tl.int32)
        two = tl.load(fields + 2).to(tl.int32)
        v_ptr = arena_ptr + tl.multiple_of(tl.load(fields + 3), 128)
        sums = _shrink_digits(x_at, here, v_ptr, count_here, start, inputs, WARPS, SPLIT, QUICK, STAGES)
    else:
        start -= _at(coded_blocks, index) * _RANKS
        place += _at(coded_blocks, index) * _RANKS
        count_here = _at(halves, index)
        four = 0
        two = 0
        v_ptr = arena_ptr + tl.multiple_of(tl.load(fields + 6), 128)
        sums = _shrink_halves(x_at, here, v_ptr, count_here, start, inputs, WARPS, SPLIT, STAGES)
    if SPLIT:
        sums = tl.sum(sums, axis=0, keep_dims=True)
        row, here = _warp_rows(order_ptr, first, count, 1, SPLIT)
        _store(shrunk_ptr + row * places + place, here, sums, four, two, start, 1)
    else:
        _store(shrunk_ptr + row * places + place, here, sums, four, two, start, WARPS)


@triton.jit
def _expand_halves(at, column, outputs, known, t, sums, PLANE: tl.constexpr):
    """Add one plane's products of ranks of 16 bits."""
    column += PLANE * _WORDS
    u = tl.load(
        at + column[None, :, None], mask=known[:, None, :] & (column < outputs)[None, :, None], other=0.0
    )
    return dot(u.to(tl.float32).to(t.dtype), t, sums)


@triton.jit
def _slice_of(panel, outputs0, outputs1, outputs2, outputs3):
    """Which slice a panel is in, which of its panels it is, the slice's first column, and how many it has;
    slices do not share panels."""
    index = 0
    first_column = 0
    outputs = outputs0
    for s in tl.static_range(1, _SLICES):
        panels = (outputs + _PANEL - 1) // _PANEL
        if (index == s - 1) & (panel >= panels):
            panel -= panels
            index = s
            first_column += outputs
            outputs = outputs1 if s == 1 else outputs2 if s == 2 else outputs3
    return index, panel, first_column, outputs


@triton.jit(do_not_specialize=["num_slices"])
def _expand(
    out_ptr,
    arena_ptr,
    table_ptr,
    tiles_ptr,
    order_ptr,
    shrunk_ptr,  # float32 [T, places]
    out_stride,
    places,
    num_slices,
    outputs0,
    outputs1,
    outputs2,
    outputs3,
    WARPS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    QUICK: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
    slot, first, count = tile_at(tiles_ptr, tile)
    if slot < 0:
        return
    index, panel, first_column, outputs = _slice_of(tl.program_id(0), outputs0, outputs1, outputs2, outputs3)
    described = table_ptr + slot.to(tl.int64) * num_slices * _PER_SLICE
    all_digits, all_halves, coded_blocks, half_blocks = _slices(described, num_slices)
    digits = _at(all_digits, index)
    halves = _at(all_halves, index)
    if digits + halves == 0:
        return
    place = _before(coded_blocks + half_blocks, index) * _RANKS
    fields = described + _PER_SLICE * index
    dtype = out_ptr.dtype.element_ty
    row, here = _warp_rows(order_ptr, first, count, WARPS, SPLIT)
    t_at = (shrunk_ptr + row * places + place)[:, None, :]
    i = tl.arange(0, _WORDS)
    g = tl.arange(0, WARPS)[:, None]
    sums0 = tl.zeros((WARPS, _WORDS, _ROWS), tl.float32)
    sums1 = sums0
    sums2 = sums0
    sums3 = sums0
    sums4 = sums0
    sums5 = sums0
    sums6 = sums0
    sums7 = sums0

    panels = (outputs + _PANEL - 1) // _PANEL
    u_ptr = arena_ptr + tl.multiple_of(tl.load(fields + 4), 128)
    words_ptr = u_ptr.to(tl.pointer_type(tl.int16))
    scales_ptr = u_ptr.to(tl.pointer_type(tl.float16)) + panels * digits * _WORDS
    zeros_ptr = words_ptr + panels * digits * (_WORDS + 1)
    stride: tl.constexpr = _RANKS * WARPS if SPLIT else _RANKS
    mine = tl.arange(0, _RANKS)[None, :] + (_RANKS * g if SPLIT else 0 * g)
    scales_at = scales_ptr + panel * digits
    zeros_at = zeros_ptr + panel // _IN_WORD * digits
    next_scale = tl.load(scales_at + mine, mask=mine < digits, other=0.0)
    next_zero = tl.load(zeros_at + mine, mask=mine < digits, other=0)
    for start in tl.range(0, digits, stride, num_stages=STAGES):
        r = start + mine
        known = r < digits
        at = panel * digits + r
        words = tl.load(
            words_ptr + (at * _WORDS)[:, None, :] + i[None, :, None], mask=known[:, None, :], other=0
        )
        t = tl.load(
            t_at + r[:, :, None],
            mask=(r // _RANKS * _RANKS < digits)[:, :, None] & here[:, None, :],
            other=0.0,
        )
        t = (t * next_scale.to(tl.float32)[:, :, None]).to(dtype)
        zero = ((next_zero >> (2 * (panel % _IN_WORD)).to(tl.int16)) & 3).to(tl.float32)[:, None, :]
        # One step ahead: the pipeliner moves none but the operands of products.
        more = r + stride < digits
        next_scale = tl.load(scales_at + r + stride, mask=more, other=0.0)
        next_zero = tl.load(zeros_at + r + stride, mask=more, other=0)
        sums0 = dot(_digit(words, zero, 0, QUICK, dtype), t, sums0)
        sums1 = dot(_digit(words, zero, 1, QUICK, dtype), t, sums1)
        sums2 = dot(_digit(words, zero, 2, QUICK, dtype), t, sums2)
        sums3 = dot(_digit(words, zero, 3, QUICK, dtype), t, sums3)
        sums4 = dot(_digit(words, zero, 4, QUICK, dtype), t, sums4)
        sums5 = dot(_digit(words, zero, 5, QUICK, dtype), t, sums5)
        sums6 = dot(_digit(words, zero, 6, QUICK, dtype), t, sums6)
        sums7 = dot(_digit(words, zero, 7, QUICK, dtype), t, sums7)

    column = panel * _PANEL + i
    values_ptr = (arena_ptr + tl.multiple_of(tl.load(fields + 7), 128)).to(tl.pointer_type(tl.float16))
    half_first = _at(coded_blocks, index) * _RANKS
    for start in tl.range(0, halves, stride, num_stages=1):
        r = start + mine
        known = r < halves
        t = tl.load(t_at + (half_first + r)[:, :, None], mask=known[:, :, None] & here[:, None, :], other=0.0)
        t = t.to(dtype)
        at = values_ptr + (r.to(tl.int64) * outputs)[:, None, :]
        sums0 = _expand_halves(at, column, outputs, known, t, sums0, 0)
        sums1 = _expand_halves(at, column, outputs, known, t, sums1, 1)
        sums2 = _expand_halves(at, column, outputs, known, t, sums2, 2)
        sums3 = _expand_halves(at, column, outputs, known, t, sums3, 3)
        sums4 = _expand_halves(at, column, outputs, known, t, sums4, 4)
        sums5 = _expand_halves(at, column, outputs, known, t, sums5, 5)
        sums6 = _expand_halves(at, column, outputs, known, t, sums6, 6)
        sums7 = _expand_halves(at, column, outputs, known, t, sums7, 7)

    # [WARPS or 1, WORDS, ROWS, 2, 2, 2]: the last three are the plane's number in binary.
    sums = tl.join(
        tl.join(tl.join(sums0, sums4), tl.join(sums2, sums6)),
        tl.join(tl.join(sums1, sums5), tl.join(sums3, sums7)),
    )
    if SPLIT:
        sums = tl.sum(sums, axis=0, keep_dims=True)
        row, here = _warp_rows(order_ptr, first, count, 1, SPLIT)
    b = tl.arange(0, 2)
    plane = 4 * b[:, None, None] + 2 * b[None, :, None] + b[None, None, :]
    column = panel * _PANEL + i[:, None, None, None] + _WORDS * plane[None, :, :, :]
    column = column[None, :, None, :, :, :]
    at = (out_ptr + row * out_stride + first_column)[:, None, :, None, None, None] + column
    mask = here[:, None, :, None, None, None] & (column < outputs)
    old = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (old + sums).to(out_ptr.dtype.element_ty), mask=mask)


def shrink(
    x: torch.Tensor,  # [T, K]
    arena: torch.Tensor,
    table: torch.Tensor,
    tiles: Tiles,
    plan: Plan,
    scratch: Scratch,
) -> None:
    pdl = low_rank.dependent_launches(x.device)
    _shrink[scratch.places // layout.PLACES, tiles.max_tiles](
        x,
        arena,
        table,
        tiles.tiles,
        tiles.order,
        scratch.shrunk,
        x.shape[1],
        x.stride(0),
        scratch.places,
        table.shape[1] // layout.PER_SLICE,
        **shrink_options(plan, x.dtype, pdl),
    )


def expand(
    out: torch.Tensor,  # [T, N]
    arena: torch.Tensor,
    table: torch.Tensor,
    tiles: Tiles,
    slices: tuple[int, ...],
    plan: Plan,
    scratch: Scratch,
) -> None:
    pdl = low_rank.dependent_launches(out.device)
    panels = sum(-(-outputs // layout.PANEL) for outputs in slices)
    _expand[panels, tiles.max_tiles](
        out,
        arena,
        table,
        tiles.tiles,
        tiles.order,
        scratch.shrunk,
        out.stride(0),
        scratch.places,
        len(slices),
        *slices,
        *[0] * (MOST_SLICES - len(slices)),
        **expand_options(plan, out.dtype, pdl),
    )


def shrink_options(plan: Plan, dtype: torch.dtype, pdl: bool) -> dict[str, Any]:
    """What a compiled shrink depends on, besides its arguments' types: nothing of a linear's shape."""
    # Left alone, ptxas takes a quarter more registers, which halves the programs at work.
    return {**_options(plan, plan.shrink_warps, dtype, pdl), "maxnreg": REGISTERS}


def expand_options(plan: Plan, dtype: torch.dtype, pdl: bool) -> dict[str, Any]:
    return _options(plan, plan.expand_warps, dtype, pdl)


def _options(plan: Plan, warps: int, dtype: torch.dtype, pdl: bool) -> dict[str, Any]:
    # Digits are decoded by assembly, which the interpreter does not know.
    quick = dtype == torch.bfloat16 and not triton.knobs.runtime.interpret
    found = {"WARPS": warps, "SPLIT": plan.split, "STAGES": plan.stages, "QUICK": quick, "PDL": pdl}
    return {**found, "num_warps": warps, **({"launch_pdl": True} if pdl else {})}
