"""Singular-value deltas in two Triton launches for all variants, slices and bits of a batch.

All weights of a slice except its ranks of 16 bits are digits of two bits, so one loop serves all bit widths.
Weights are the left operand of the tensor cores and the batch's rows the right operand, of which eight
suffice. Words of codes stay packed up to registers, where one instruction turns two codes into two numbers.

Shrink: a program has 128 digits and all columns, or a part of them; its warps share the rows' columns. Scales
and zero points belong to 128 columns of one digit: zero points are subtracted from the codes, and scales
multiply the products of a panel.

Expand: a program has 128 columns and all digits. Scales multiply the right operand. Codes keep an excess that
depends on their place in the word. At the end the kernel subtracts that number and the zero point, times the
right operand, from the sums.

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
from workers.kernels.svd_delta.plan import MAX_SLICES, Plan, Scratch

_PER_SLICE = tl.constexpr(layout.PER_SLICE)
_WORDS = tl.constexpr(layout.WORDS)
_LINE = tl.constexpr(layout.LINE)
_PANEL = tl.constexpr(layout.PANEL)
_IN_WORD = tl.constexpr(layout.IN_WORD)
_SLICES = tl.constexpr(MAX_SLICES)
_PLACES = tl.constexpr(layout.PLACES)  # digits, or ranks of 16 bits, of one program of the shrink
_HALF = tl.constexpr(layout.PLACES // 2)
_RANKS = tl.constexpr(32)  # that a warp of the expand takes at a time
# Numbers become bfloat16 through float32 everywhere: the interpreter has no other way.


@triton.jit
def _shifted(words):
    """Move three planes down to the lower bits; the neighbouring word's bits end up above the bits in use."""
    return tl.inline_asm_elementwise(
        "shr.b32 $0, $1, 6;", "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2
    )


@triton.jit
def _code(words, PLANE: tl.constexpr, QUICK: tl.constexpr, DTYPE: tl.constexpr):
    """DTYPE: the words' digits number PLANE, plus `_excess`."""
    if QUICK:
        if PLANE >= 6:
            words = _shifted(_shifted(words))
        elif PLANE >= 3:
            words = _shifted(words)
        pick: tl.constexpr = _pick(PLANE)
        code = tl.inline_asm_elementwise(pick, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        code = ((words >> 2 * PLANE) & 3).to(tl.float32).to(DTYPE)
    return code


@triton.constexpr_function
def _pick(plane: int) -> str:
    """The assembly that extracts a digit: 128, 32 and 8 have room for a digit whose lowest bit is one, at
    bits 0, 2 and 4.
    """
    mask, magic = ((0x00030003, 0x43004300), (0x000C000C, 0x42004200), (0x00300030, 0x41004100))[plane % 3]
    return f"lop3.b32 $0, $1, {mask:#x}, {magic:#x}, 0xEA;"


@triton.constexpr_function
def _excess(plane: int, quick: bool) -> float:
    return (128.0, 32.0, 8.0)[plane % 3] if quick else 0.0


@triton.jit
def _constant(words, VALUE: tl.constexpr, QUICK: tl.constexpr, DTYPE: tl.constexpr):
    """VALUE in the shape of `words`."""
    if QUICK:
        # The words are a formal operand, so the result has the codes' register layout: `x` is loaded only
        # once.
        move: tl.constexpr = _move(VALUE)
        constant = tl.inline_asm_elementwise(move, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        constant = tl.full(words.shape, VALUE, tl.float32).to(DTYPE)
    return constant


@triton.constexpr_function
def _move(value: float) -> str:
    half = {1.0: 0x3F80, 128.0: 0x4300, 32.0: 0x4200, 8.0: 0x4100}[value]
    return f"mov.b32 $0, {half * 0x10001:#x};"


@triton.jit
def _rounded(values, QUICK: tl.constexpr, DTYPE: tl.constexpr):
    if QUICK:
        # Without this the compiler converts one value at a time, which is eight times slower.
        two: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        rounded = tl.inline_asm_elementwise(two, "=r,r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        rounded = values.to(DTYPE)
    return rounded


@triton.jit
def _program(described, num_slices, block):
    """The slice of a shrink program (-1: none), its first digit or rank of 16 bits, whether it has digits,
    and the slice's number of them.
    """
    index = -1
    first = 0
    coded = False
    count = 0
    for s in tl.static_range(_SLICES):
        here = s < num_slices
        digits = tl.load(described + _PER_SLICE * s, mask=here, other=0).to(tl.int32)
        halves = tl.load(described + _PER_SLICE * s + 5, mask=here, other=0).to(tl.int32)
        coded_blocks = tl.cdiv(digits, _PLACES)
        blocks = coded_blocks + tl.cdiv(halves, _PLACES)
        if (index < 0) & (block < blocks) & (block >= 0):
            index = s
            coded = block < coded_blocks
            first = (block if coded else block - coded_blocks) * _PLACES
            count = digits if coded else halves
        block -= blocks
    return index, first, coded, count


@triton.jit
def _shrink_digits(x_at, v_ptr, digits, start, inputs, first_panel, last_panel, EVEN: tl.constexpr,
                   QUICK: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """V x^T of digits `start` on: two of [HALF, ROWS]. Digits past the last repeat the last."""
    dtype = x_at.dtype.element_ty
    panels = (inputs + _PANEL - 1) // _PANEL
    words_ptr = v_ptr.to(tl.pointer_type(tl.int16))
    scales_ptr = words_ptr.to(tl.pointer_type(tl.float16)) + panels * digits * _WORDS
    line = tl.cdiv(digits, _LINE) * _LINE
    zeros_ptr = words_ptr + panels * (digits * _WORDS + line)
    r0 = tl.minimum(start + tl.arange(0, _HALF), digits - 1)
    r1 = tl.minimum(start + _HALF + tl.arange(0, _HALF), digits - 1)
    i = tl.arange(0, _WORDS)
    sums0 = tl.zeros((_HALF, x_at.shape[0]), tl.float32)
    sums1 = sums0
    at = tl.minimum(first_panel, panels - 1)
    scale0 = tl.load(scales_ptr + at * line + r0)
    scale1 = tl.load(scales_ptr + at * line + r1)
    zeros0 = tl.load(zeros_ptr + at // _IN_WORD * line + r0)
    zeros1 = tl.load(zeros_ptr + at // _IN_WORD * line + r1)
    for step in tl.range(0, last_panel - first_panel, num_stages=STAGES):
        panel = first_panel + step
        words0 = tl.load(words_ptr + ((panel * digits + r0) * _WORDS)[:, None] + i[None, :])
        words1 = tl.load(words_ptr + ((panel * digits + r1) * _WORDS)[:, None] + i[None, :])
        shift = (2 * (panel % _IN_WORD)).to(tl.int16)
        zero0 = ((zeros0 >> shift) & 3).to(tl.float32)[:, None]
        zero1 = ((zeros1 >> shift) & 3).to(tl.float32)[:, None]
        factor0 = scale0.to(tl.float32)[:, None]
        factor1 = scale1.to(tl.float32)[:, None]
        # One step ahead: the pipeliner moves only the operands of products.
        at = tl.minimum(panel + 1, panels - 1)
        scale0 = tl.load(scales_ptr + at * line + r0)
        scale1 = tl.load(scales_ptr + at * line + r1)
        zeros0 = tl.load(zeros_ptr + at // _IN_WORD * line + r0)
        zeros1 = tl.load(zeros_ptr + at // _IN_WORD * line + r1)
        products0 = tl.zeros((_HALF, x_at.shape[0]), tl.float32)
        products1 = products0
        excess = products0
        ones = products0
        for plane in tl.static_range(8):
            column = panel * _PANEL + plane * _WORDS + i
            if EVEN:
                x = tl.load(x_at[None, :] + column[:, None])
            else:
                x = tl.load(x_at[None, :] + column[:, None], mask=(column < inputs)[:, None], other=0.0)
            products0 = dot(_code(words0, plane, QUICK, dtype), x, products0)
            products1 = dot(_code(words1, plane, QUICK, dtype), x, products1)
            ones = dot(_constant(words0, 1.0, QUICK, dtype), x, ones)
            if QUICK:
                excess = dot(_constant(words0, _excess(plane, QUICK), QUICK, dtype), x, excess)
        sums0 += (products0 - excess - ones * zero0) * factor0
        sums1 += (products1 - excess - ones * zero1) * factor1
    return sums0, sums1


@triton.jit
def _shrink_halves(x_at, v_ptr, halves, start, inputs, first_panel, last_panel):
    """[HALF, ROWS]: V x^T of ranks `start` on."""
    dtype = x_at.dtype.element_ty
    values = v_ptr.to(tl.pointer_type(tl.float16))
    r = start + tl.arange(0, _HALF)
    i = tl.arange(0, _RANKS)
    sums = tl.zeros((_HALF, x_at.shape[0]), tl.float32)
    for first in tl.range(first_panel * _PANEL, tl.minimum(last_panel * _PANEL, inputs), _RANKS):
        column = first + i
        inside = column < inputs
        v = tl.load(
            values + (r.to(tl.int64) * inputs)[:, None] + column[None, :],
            mask=(r < halves)[:, None] & inside[None, :],
            other=0.0,
        )
        x = tl.load(x_at[None, :] + column[:, None], mask=inside[:, None], other=0.0)
        sums = dot(v.to(tl.float32).to(dtype), x, sums)
    return sums


@triton.jit
def _store(at, here, sums, count, four, two, start):
    """Store [HALF, ROWS] inner products from digit `start` on; for ranks with several digits, store their
    sum.
    """
    r = start + tl.arange(0, _HALF)
    sums = tl.where((r < count)[:, None], sums, 0.0)  # zeros past the last digit: expand reads whole blocks
    tl.store(at[None, :] + r[:, None], sums, mask=(r >= two)[:, None] & here[None, :])
    if start < two:
        pairs = tl.sum(tl.reshape(sums, (_HALF // 2, 2, sums.shape[1])), axis=1)
        of_pair = start + 2 * tl.arange(0, _HALF // 2)
        pair_mask = ((of_pair >= four) & (of_pair < two))[:, None] & here[None, :]
        for digit in tl.static_range(2):
            tl.store(at[None, :] + (of_pair + digit)[:, None], pairs, mask=pair_mask)
        quads = tl.sum(tl.reshape(pairs, (_HALF // 4, 2, sums.shape[1])), axis=1)
        of_quad = start + 4 * tl.arange(0, _HALF // 4)
        quad_mask = (of_quad < four)[:, None] & here[None, :]
        for digit in tl.static_range(4):
            tl.store(at[None, :] + (of_quad + digit)[:, None], quads, mask=quad_mask)


@triton.jit
def _cut(tiles_ptr, CUTS: tl.constexpr, ROWS: tl.constexpr):
    """The tile's slot (-1: nothing to do), and the first row and number of rows of a program's part."""
    slot, first, count = tile_at(tiles_ptr, tl.program_id(1) // CUTS)
    first_row = tl.program_id(1) % CUTS * ROWS
    return tl.where(count > first_row, slot, -1), first + first_row, count - first_row


@triton.jit(do_not_specialize=["num_slices"])
def _shrink(
    x_ptr,
    arena_ptr,
    table_ptr,
    tiles_ptr,
    order_ptr,
    shrunk_ptr,  # float32 [SPLITS, T, places]
    inputs,
    x_stride,
    places,
    split_stride,
    num_slices,
    ROWS: tl.constexpr,
    CUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    QUICK: tl.constexpr,
    PDL: tl.constexpr,
):
    block = tl.program_id(0)
    split = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot, first_row, count = _cut(tiles_ptr, CUTS, ROWS)
    if slot < 0:
        return
    described = table_ptr + slot.to(tl.int64) * num_slices * _PER_SLICE
    index, start, coded, ranks = _program(described, num_slices, block)
    if index < 0:
        return
    here = tl.arange(0, ROWS) < count
    # Missing rows repeat the first row: their products are not stored.
    row = tl.load(order_ptr + first_row + tl.where(here, tl.arange(0, ROWS), 0)).to(tl.int64)
    x_at = x_ptr + row * x_stride
    fields = described + _PER_SLICE * index
    panels = (inputs + _PANEL - 1) // _PANEL
    per_split = (panels + SPLITS - 1) // SPLITS
    first_panel = split * per_split
    last_panel = tl.minimum(first_panel + per_split, panels)
    at = shrunk_ptr + split.to(tl.int64) * split_stride + row * places + (block * _PLACES - start)
    if coded:
        four = tl.load(fields + 1).to(tl.int32)
        two = tl.load(fields + 2).to(tl.int32)
        v_ptr = arena_ptr + tl.multiple_of(tl.load(fields + 3), 128)
        sums0, sums1 = _shrink_digits(
            x_at, v_ptr, ranks, start, inputs, first_panel, last_panel, EVEN, QUICK, STAGES
        )
        _store(at, here, sums0, ranks, four, two, start)
        _store(at, here, sums1, ranks, four, two, start + _HALF)
    else:
        v_ptr = arena_ptr + tl.multiple_of(tl.load(fields + 6), 128)
        for half in tl.range(2):
            sums = _shrink_halves(x_at, v_ptr, ranks, start + half * _HALF, inputs, first_panel, last_panel)
            _store(at, here, sums, ranks, 0, 0, start + half * _HALF)


@triton.jit
def _inner(t_at, r, here, known, split_stride, SPLITS: tl.constexpr):
    """[RANKS, ROWS]: the shrink's results, summed over all its parts."""
    mask = known[:, None] & here[None, :]
    t = tl.load(t_at[None, :] + r[:, None], mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        t += tl.load(t_at[None, :] + (split_stride * split + r)[:, None], mask=mask, other=0.0)
    return t


@triton.jit
def _expand_halves(at, column, outputs, known, t, sums, PLANE: tl.constexpr):
    """Add one plane's products of ranks of 16 bits."""
    column += PLANE * _WORDS
    u = tl.load(at[None, :] + column[:, None], mask=known[None, :] & (column < outputs)[:, None], other=0.0)
    return dot(u.to(tl.float32).to(t.dtype), t, sums)


@triton.jit
def _slice_of(panel, outputs0, outputs1, outputs2, outputs3):
    """A panel's slice, its number within the slice, the slice's first column, and the slice's number of
    columns.

    Slices do not share panels.
    """
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


@triton.jit
def _places_of(described, num_slices, index):
    """A slice's digits, its ranks of 16 bits, and where the products of each begin."""
    place = 0
    digits = 0
    halves = 0
    for s in tl.static_range(_SLICES):
        here = s < num_slices
        d = tl.load(described + _PER_SLICE * s, mask=here, other=0).to(tl.int32)
        h = tl.load(described + _PER_SLICE * s + 5, mask=here, other=0).to(tl.int32)
        place += tl.where(s < index, tl.cdiv(d, _PLACES) + tl.cdiv(h, _PLACES), 0) * _PLACES
        digits = tl.where(s == index, d, digits)
        halves = tl.where(s == index, h, halves)
    return digits, halves, place, place + tl.cdiv(digits, _PLACES) * _PLACES


@triton.jit(do_not_specialize=["num_slices"])
def _expand(
    out_ptr,
    arena_ptr,
    table_ptr,
    tiles_ptr,
    order_ptr,
    shrunk_ptr,  # float32 [SPLITS, T, places]
    out_stride,
    places,
    split_stride,
    num_slices,
    outputs0,
    outputs1,
    outputs2,
    outputs3,
    ROWS: tl.constexpr,
    CUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    QUICK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    slot, first_row, count = _cut(tiles_ptr, CUTS, ROWS)
    if slot < 0:
        return
    index, panel, first_column, outputs = _slice_of(tl.program_id(0), outputs0, outputs1, outputs2, outputs3)
    described = table_ptr + slot.to(tl.int64) * num_slices * _PER_SLICE
    digits, halves, place, half_place = _places_of(described, num_slices, index)
    if digits + halves == 0:
        return
    fields = described + _PER_SLICE * index
    dtype = out_ptr.dtype.element_ty
    m = tl.arange(0, ROWS)
    here = m < count
    row = tl.load(order_ptr + first_row + m, mask=here, other=0).to(tl.int64)
    t_at = shrunk_ptr + row * places
    i = tl.arange(0, _WORDS)
    mine = tl.arange(0, _RANKS)
    sums0 = tl.zeros((_WORDS, ROWS), tl.float32)
    sums1 = sums0
    sums2 = sums0
    sums3 = sums0
    sums4 = sums0
    sums5 = sums0
    sums6 = sums0
    sums7 = sums0
    total = sums0  # the sum of the right operand; below, the sum of it times its zero points
    zeros = tl.zeros((_RANKS, ROWS), tl.float32)

    panels = (outputs + _PANEL - 1) // _PANEL
    u_ptr = arena_ptr + tl.multiple_of(tl.load(fields + 4), 128)
    words_ptr = u_ptr.to(tl.pointer_type(tl.int16))
    line = tl.cdiv(digits, _LINE) * _LINE
    scales_at = u_ptr.to(tl.pointer_type(tl.float16)) + panels * digits * _WORDS + panel * line
    zeros_at = words_ptr + panels * (digits * _WORDS + line) + panel // _IN_WORD * line
    shift = (2 * (panel % _IN_WORD)).to(tl.int16)
    last = digits - 1  # digits past the last repeat the last: they are multiplied by zero
    next_scale = tl.load(scales_at + tl.minimum(mine, last), mask=mine < digits, other=0.0)
    next_zero = tl.load(zeros_at + tl.minimum(mine, last), mask=mine < digits, other=0)
    next_t = _inner(t_at + place, mine, here, mine // _RANKS * _RANKS < digits, split_stride, SPLITS)
    for start in tl.range(0, digits, _RANKS, num_stages=STAGES):
        r = start + mine
        at = panel * digits + tl.minimum(r, last)
        words = tl.load(words_ptr + (at * _WORDS)[None, :] + i[:, None])
        t = _rounded(next_t * next_scale.to(tl.float32)[:, None], QUICK, dtype)
        zeros += t.to(tl.float32) * ((next_zero >> shift) & 3).to(tl.float32)[:, None]
        # One step ahead by hand: the pipeliner moves only the operands of products. It would move `t`, which
        # as float32 does not fit the banks of shared memory.
        r += _RANKS
        next_scale = tl.load(scales_at + tl.minimum(r, last))
        next_zero = tl.load(zeros_at + tl.minimum(r, last))
        next_t = _inner(t_at + place, r, here, r // _RANKS * _RANKS < digits, split_stride, SPLITS)
        sums0 = dot(_code(words, 0, QUICK, dtype), t, sums0)
        sums1 = dot(_code(words, 1, QUICK, dtype), t, sums1)
        sums2 = dot(_code(words, 2, QUICK, dtype), t, sums2)
        sums3 = dot(_code(words, 3, QUICK, dtype), t, sums3)
        sums4 = dot(_code(words, 4, QUICK, dtype), t, sums4)
        sums5 = dot(_code(words, 5, QUICK, dtype), t, sums5)
        sums6 = dot(_code(words, 6, QUICK, dtype), t, sums6)
        sums7 = dot(_code(words, 7, QUICK, dtype), t, sums7)
        if QUICK:
            total = dot(_constant(words, 1.0, QUICK, dtype), t, total)
    less = tl.sum(zeros, axis=0)[None, :]
    sums0 -= less + _excess(0, QUICK) * total
    sums1 -= less + _excess(1, QUICK) * total
    sums2 -= less + _excess(2, QUICK) * total
    sums3 -= less + _excess(3, QUICK) * total
    sums4 -= less + _excess(4, QUICK) * total
    sums5 -= less + _excess(5, QUICK) * total
    sums6 -= less + _excess(6, QUICK) * total
    sums7 -= less + _excess(7, QUICK) * total

    column = panel * _PANEL + i
    values_ptr = (arena_ptr + tl.multiple_of(tl.load(fields + 7), 128)).to(tl.pointer_type(tl.float16))
    for start in tl.range(0, halves, _RANKS, num_stages=1):
        r = start + mine
        known = r < halves
        t = _inner(t_at + half_place, r, here, known, split_stride, SPLITS).to(dtype)
        at = values_ptr + r.to(tl.int64) * outputs
        sums0 = _expand_halves(at, column, outputs, known, t, sums0, 0)
        sums1 = _expand_halves(at, column, outputs, known, t, sums1, 1)
        sums2 = _expand_halves(at, column, outputs, known, t, sums2, 2)
        sums3 = _expand_halves(at, column, outputs, known, t, sums3, 3)
        sums4 = _expand_halves(at, column, outputs, known, t, sums4, 4)
        sums5 = _expand_halves(at, column, outputs, known, t, sums5, 5)
        sums6 = _expand_halves(at, column, outputs, known, t, sums6, 6)
        sums7 = _expand_halves(at, column, outputs, known, t, sums7, 7)

    # [WORDS, ROWS, 2, 2, 2]: the last three are the plane's number in binary.
    sums = tl.join(
        tl.join(tl.join(sums0, sums4), tl.join(sums2, sums6)),
        tl.join(tl.join(sums1, sums5), tl.join(sums3, sums7)),
    )
    b = tl.arange(0, 2)
    plane = 4 * b[:, None, None] + 2 * b[None, :, None] + b[None, None, :]
    column = panel * _PANEL + i[:, None, None, None] + _WORDS * plane[None, :, :, :]
    column = column[:, None, :, :, :]
    at = (out_ptr + row * out_stride + first_column)[None, :, None, None, None] + column
    mask = here[None, :, None, None, None] & (column < outputs)
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
    cuts = -(-tiles.block // plan.shrink_rows)
    _shrink[scratch.places // layout.PLACES, tiles.max_tiles * cuts, plan.splits](
        x,
        arena,
        table,
        tiles.tiles,
        tiles.order,
        scratch.shrunk,
        x.shape[1],
        x.stride(0),
        scratch.places,
        x.shape[0] * scratch.places,
        table.shape[1] // layout.PER_SLICE,
        ROWS=plan.shrink_rows,
        CUTS=cuts,
        SPLITS=plan.splits,
        EVEN=x.shape[1] % layout.PANEL == 0,
        STAGES=plan.shrink_stages,
        num_warps=plan.shrink_warps,
        **_options(x),
        **_registers(plan.shrink_registers),
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
    cuts = -(-tiles.block // plan.expand_rows)
    panels = sum(-(-outputs // layout.PANEL) for outputs in slices)
    _expand[panels, tiles.max_tiles * cuts](
        out,
        arena,
        table,
        tiles.tiles,
        tiles.order,
        scratch.shrunk,
        out.stride(0),
        scratch.places,
        out.shape[0] * scratch.places,
        len(slices),
        *slices,
        *[0] * (MAX_SLICES - len(slices)),
        ROWS=plan.expand_rows,
        CUTS=cuts,
        SPLITS=plan.splits,
        STAGES=plan.expand_stages,
        num_warps=plan.expand_warps,
        **_options(out),
        **_registers(plan.expand_registers),
    )


def _options(values: torch.Tensor) -> dict[str, Any]:
    pdl = low_rank.dependent_launches(values.device)
    # Digits are decoded by assembly, which the interpreter does not have.
    quick = values.dtype == torch.bfloat16 and not triton.knobs.runtime.interpret
    return {"QUICK": quick, "PDL": pdl, **({"launch_pdl": True} if pdl else {})}


def _registers(most: int | None) -> dict[str, Any]:
    return {} if most is None else {"maxnreg": most}
