"""Singular-value deltas in two Triton launches for all variants, slices and bits of a batch.

Weights are the left operand of the tensor cores: words of codes go from memory to registers as they are,
and one shift and one logical operation turn two codes into two bfloat16 numbers (128 + code: the bits of
128.0 with the code in the lowest). Scales belong to 128 columns of one rank, so shrink applies them after
the products of a group, and expand to its other operand before them.
As for LoRA, sums have a fixed order and grids depend on shapes alone.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from workers.kernels.rows import Tiles
from workers.kernels.svd_delta import layout
from workers.kernels.svd_delta.plan import Plan, Scratch

_BITS = tl.constexpr(layout.BITS)
_KINDS = tl.constexpr(len(layout.BITS))
_PER_GROUP = tl.constexpr(layout.PER_GROUP)
_WORDS = tl.constexpr(layout.WORDS)
_PANEL = tl.constexpr(layout.PANEL)
_BLOCK_R = tl.constexpr(layout.RANK_BLOCK)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Numbers become bfloat16 by way of float32 throughout: the interpreter knows no other way.
# What the quick way of decoding adds to each code.
_BIAS = tl.constexpr(128.0)


@triton.jit
def _dot(left, right, sums):
    if _INTERPRETED:  # the interpreter multiplies bfloat16 as if its bits were integers
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, sums, input_precision="ieee")


@triton.jit
def _less(codes, zero):
    """codes - zero: small whole numbers, exact in any of the types."""
    if _INTERPRETED:  # as above
        return (codes.to(tl.float32) - zero).to(codes.dtype)
    return codes - zero.to(codes.dtype)


@triton.jit
def _quick(words):
    """bfloat16 128 + the lowest two bits of each word."""
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, 0x00030003, 0x43004300, 0xEA;",
        "=r,r",
        [words],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _shifted(words):
    """Each word's next code in its lowest two bits; what comes in from the neighbour is never looked at."""
    return tl.inline_asm_elementwise(
        "shr.b32 $0, $1, 2;", "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2
    )


@triton.jit
def _load_words(at, high_at, digit, mask, BITS: tl.constexpr):
    """int16: every digit's words, `digit` words apart, and those of the third bit; or the first's again."""
    first = tl.load(at, mask=mask, other=0)
    second = first
    third = first
    fourth = first
    high = first
    if BITS >= 4:
        second = tl.load(at + digit, mask=mask, other=0)
    if BITS == 8:
        third = tl.load(at + 2 * digit, mask=mask, other=0)
        fourth = tl.load(at + 3 * digit, mask=mask, other=0)
    if BITS == 3:
        high = tl.load(high_at, mask=mask, other=0)
    return first, second, third, fourth, high


@triton.jit
def _codes(words, high_shift, PLANE: tl.constexpr, BITS: tl.constexpr):
    """int16: the codes of one plane, from their digits."""
    first, second, third, fourth, high = words
    found = (first >> 2 * PLANE) & 3
    if BITS == 3:
        found |= ((high >> (2 * PLANE + high_shift)) & 1) << 2
    if BITS >= 4:
        found |= ((second >> 2 * PLANE) & 3) << 2
    if BITS == 8:
        found |= ((third >> 2 * PLANE) & 3) << 4
        found |= ((fourth >> 2 * PLANE) & 3) << 6
    return found


@triton.jit
def _words_per_digit_set(digit, BITS: tl.constexpr):
    """int16 words that all digits of a matrix take, the third bit's included."""
    if BITS == 3:
        return digit + digit // 2
    return digit * (BITS // 2)


@triton.jit
def _scales(scales, zeros, group, groups, rank, r, known):
    """Scales and zeros of ranks `r` in `group` and in the one after it."""
    more = known & (group + 1 < groups)
    at = group * rank + r
    return (
        tl.load(scales + at, mask=known, other=0.0),
        tl.load(zeros + at, mask=known, other=0),
        tl.load(scales + at + rank, mask=more, other=0.0),
        tl.load(zeros + at + rank, mask=more, other=0),
    )


@triton.jit
def _shrink_group(
    x_at,  # pointers [BLOCK_M], the rows of x
    v_ptr,  # uint8
    rank,
    r,  # [BLOCK_R]
    inputs,
    first_panel,
    last_panel,
    BLOCK_M: tl.constexpr,
    BITS: tl.constexpr,
    QUICK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """[BLOCK_R, BLOCK_M]: V x^T over some panels of the inputs."""
    dtype = x_at.dtype.element_ty
    sums = tl.zeros((_BLOCK_R, BLOCK_M), tl.float32)
    here = r < rank
    i = tl.arange(0, _WORDS)
    if BITS == 16:
        values = v_ptr.to(tl.pointer_type(tl.float16))
        for column in tl.range(first_panel * _PANEL, last_panel * _PANEL, _WORDS):
            inside = column + i < inputs
            v = tl.load(
                values + r[:, None].to(tl.int64) * inputs + (column + i)[None, :],
                mask=here[:, None] & inside[None, :],
                other=0.0,
            )
            x = tl.load(x_at[None, :] + (column + i)[:, None], mask=inside[:, None], other=0.0)
            sums = _dot(v.to(tl.float32).to(dtype), x, sums)
    else:
        panels = (inputs + _PANEL - 1) // _PANEL
        groups = (inputs + 127) // 128
        words = v_ptr.to(tl.pointer_type(tl.int16))
        digit = panels * rank * _WORDS
        after = _words_per_digit_set(digit, BITS)
        scales = v_ptr.to(tl.pointer_type(tl.float16)) + after
        zeros = v_ptr + 2 * after + 2 * groups * rank
        # Of the next panel, one panel ahead: the pipeliner moves none but the operands of products.
        scale_next, zero_next, upper_scale_next, upper_zero_next = _scales(
            scales, zeros, 2 * first_panel, groups, rank, r, here & (first_panel < last_panel)
        )
        for panel in tl.range(first_panel, last_panel, num_stages=STAGES):
            scale_low, zero_low, scale_upper, zero_upper = (
                scale_next,
                zero_next,
                upper_scale_next,
                upper_zero_next,
            )
            scale_next, zero_next, upper_scale_next, upper_zero_next = _scales(
                scales, zeros, 2 * panel + 2, groups, rank, r, here & (panel + 1 < last_panel)
            )
            line = (panel * rank + r)[:, None]
            at = words + line * _WORDS + i[None, :]
            high_at = words + digit + line * (_WORDS // 2) + (i % (_WORDS // 2))[None, :]
            loaded = _load_words(at, high_at, digit, here[:, None], BITS)
            quick = loaded[0]
            for half in tl.static_range(2):
                scale = scale_low.to(tl.float32)
                zero = zero_low.to(tl.float32)
                if half == 1:
                    scale = scale_upper.to(tl.float32)
                    zero = zero_upper.to(tl.float32)
                if QUICK:
                    zero += _BIAS
                products = tl.zeros((_BLOCK_R, BLOCK_M), tl.float32)
                for part in tl.static_range(4):
                    column = panel * _PANEL + (4 * half + part) * _WORDS + i
                    x = tl.load(x_at[None, :] + column[:, None], mask=(column < inputs)[:, None], other=0.0)
                    if QUICK:
                        v = _quick(quick)
                        quick = _shifted(quick)
                    else:
                        shift = (i // (_WORDS // 2)).to(tl.int16)[None, :]
                        v = _codes(loaded, shift, 4 * half + part, BITS).to(tl.float32).to(dtype)
                    products = _dot(_less(v, zero[:, None]), x, products)
                sums += products * scale[:, None]
    return sums


@triton.jit
def _shrink(
    x_ptr,
    arena_ptr,
    table_ptr,
    tiles_ptr,
    order_ptr,
    shrunk_ptr,  # float32 [T, MAX_RANK]
    pieces_ptr,  # float32 [SPLITS, T, MAX_RANK]
    arrived_ptr,  # int32 [tiles, blocks of ranks]: zeros, before and after
    num_rows,
    inputs,
    x_stride,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_UP: tl.constexpr,  # the power of two not below GROUPS
    MAX_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,  # panels
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
    QUICK: tl.constexpr,
    PDL: tl.constexpr,
):
    block = tl.program_id(0)
    split = tl.program_id(1)
    tile = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(tiles_ptr + 3 * tile)
    first = tl.load(tiles_ptr + 3 * tile + 1)
    count = tl.load(tiles_ptr + 3 * tile + 2)
    if slot < 0:
        return
    # Which rank group the block is in; groups do not share blocks.
    described = table_ptr + slot.to(tl.int64) * WIDTH
    each = tl.arange(0, GROUPS_UP)
    ranks = tl.load(described + _PER_GROUP * each, mask=each < GROUPS, other=0).to(tl.int32)
    blocks = (ranks + _BLOCK_R - 1) // _BLOCK_R
    ends = tl.cumsum(blocks)
    group = tl.sum((ends <= block).to(tl.int32))
    if group >= GROUPS:
        return
    before = tl.sum(tl.where(each < group, blocks, 0))
    rank = tl.sum(tl.where(each == group, ranks, 0))
    r = (block - before) * _BLOCK_R + tl.arange(0, _BLOCK_R)
    v_ptr = arena_ptr + tl.multiple_of(tl.load(described + _PER_GROUP * group + 1), 128)
    m = tl.arange(0, BLOCK_M)
    row = tl.load(order_ptr + first + m, mask=m < count, other=0).to(tl.int64)
    x_at = x_ptr + row * x_stride
    panels = (inputs + _PANEL - 1) // _PANEL
    start = split * CHUNK
    end = tl.minimum(start + CHUNK, panels)
    sums = tl.zeros((_BLOCK_R, BLOCK_M), tl.float32)
    for kind in tl.static_range(_KINDS):
        if group % _KINDS == kind:
            sums = _shrink_group(
                x_at,
                v_ptr,
                rank,
                r,
                inputs,
                start,
                end,
                BLOCK_M,
                _BITS[kind],
                QUICK and _BITS[kind] == 2,
                STAGES,
            )
    wanted = (m < count)[None, :] & (r < rank)[:, None]
    position = block * _BLOCK_R + tl.arange(0, _BLOCK_R)
    within = row[None, :] * MAX_RANK + position[:, None]
    if SPLITS == 1:
        tl.store(shrunk_ptr + within, sums, mask=wanted)
    else:
        tl.store(pieces_ptr + split * num_rows * MAX_RANK + within, sums, mask=wanted)
        tl.debug_barrier()  # all of this program's stores come before its arrival
        arrived_at = arrived_ptr + tile * tl.num_programs(0) + block
        if tl.atomic_add(arrived_at, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros((_BLOCK_R, BLOCK_M), tl.float32)
            for piece in tl.static_range(SPLITS):
                at = pieces_ptr + piece * num_rows * MAX_RANK + within
                total += tl.load(at, mask=wanted, other=0.0, cache_modifier=".cg")
            tl.store(shrunk_ptr + within, total, mask=wanted)
            tl.store(arrived_at, 0)


@triton.jit
def _expand_plane(
    quick, loaded, high_shift, t, sums, PLANE: tl.constexpr, BITS: tl.constexpr, QUICK: tl.constexpr
):
    """Add one plane's products, with t of the half of the panel that it is in."""
    if QUICK:
        u = _quick(quick)
        quick = _shifted(quick)
    else:
        u = _codes(loaded, high_shift, PLANE, BITS).to(tl.float32).to(t.dtype)
    return quick, _dot(u, t, sums)


@triton.jit
def _expand(
    out_ptr,
    arena_ptr,
    table_ptr,
    tiles_ptr,
    order_ptr,
    shrunk_ptr,  # float32 [T, MAX_RANK]
    out_stride,
    SLICES: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_UP: tl.constexpr,
    MAX_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
    QUICK: tl.constexpr,
    PDL: tl.constexpr,
):
    block = tl.program_id(0)
    tile = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
    slot = tl.load(tiles_ptr + 3 * tile)
    begin = tl.load(tiles_ptr + 3 * tile + 1)
    count = tl.load(tiles_ptr + 3 * tile + 2)
    if slot < 0:
        return
    # Which slice the panel is in.
    index = 0
    outputs = 0
    first_column = 0
    panel = 0
    panels_before = 0
    columns_before = 0
    for s in tl.static_range(len(SLICES)):
        if block >= panels_before:
            index = s
            outputs = SLICES[s]
            first_column = columns_before
            panel = block - panels_before
        panels_before += (SLICES[s] + _PANEL - 1) // _PANEL
        columns_before += SLICES[s]
    described = table_ptr + slot.to(tl.int64) * WIDTH
    each = tl.arange(0, GROUPS_UP)
    ranks = tl.load(described + _PER_GROUP * each, mask=each < GROUPS, other=0).to(tl.int32)
    blocks = (ranks + _BLOCK_R - 1) // _BLOCK_R
    if tl.sum(tl.where(each // _KINDS == index, ranks, 0)) == 0:
        return
    position = tl.sum(tl.where(each < index * _KINDS, blocks, 0)) * _BLOCK_R
    m = tl.arange(0, BLOCK_M)
    here = m < count
    row = tl.load(order_ptr + begin + m, mask=here, other=0).to(tl.int64)
    i = tl.arange(0, _WORDS)
    ri = tl.arange(0, _BLOCK_R)
    dtype = out_ptr.dtype.element_ty
    panels = (outputs + _PANEL - 1) // _PANEL
    groups = (outputs + 127) // 128
    sums0 = tl.zeros((_WORDS, BLOCK_M), tl.float32)
    sums1 = sums0
    sums2 = sums0
    sums3 = sums0
    sums4 = sums0
    sums5 = sums0
    sums6 = sums0
    sums7 = sums0
    # What the zero points take away from every column of either half of the panel.
    less_low = tl.zeros((_BLOCK_R, BLOCK_M), tl.float32)
    less_upper = less_low
    for kind in tl.static_range(_KINDS):
        entry = described + _PER_GROUP * (index * _KINDS + kind)
        rank = tl.load(entry).to(tl.int32)
        u_ptr = arena_ptr + tl.multiple_of(tl.load(entry + 2), 128)
        words = u_ptr.to(tl.pointer_type(tl.int16))
        digit = panels * rank * _WORDS
        after = _words_per_digit_set(digit, _BITS[kind])
        scales = u_ptr.to(tl.pointer_type(tl.float16)) + after
        zeros = u_ptr + 2 * after + 2 * groups * rank
        coded = _BITS[kind] < 16
        t_at = shrunk_ptr + row[None, :] * MAX_RANK + (position + ri)[:, None]
        t_next = tl.load(t_at, mask=(ri < rank)[:, None] & here[None, :], other=0.0)
        # One block of ranks ahead: the pipeliner moves none but the operands of products.
        next_scale, next_zero, next_upper_scale, next_upper_zero = _scales(
            scales, zeros, 2 * panel, groups, rank, ri, coded & (ri < rank)
        )
        for start in tl.range(0, rank, _BLOCK_R, num_stages=STAGES):
            r = start + ri
            known = r < rank
            t = t_next
            scale, zero, upper_scale, upper_zero = next_scale, next_zero, next_upper_scale, next_upper_zero
            after_r = r + _BLOCK_R
            left = after_r < rank
            t_next = tl.load(t_at + start + _BLOCK_R, mask=left[:, None] & here[None, :], other=0.0)
            next_scale, next_zero, next_upper_scale, next_upper_zero = _scales(
                scales, zeros, 2 * panel, groups, rank, after_r, coded & left
            )
            if _BITS[kind] == 16:
                low = t.to(dtype)
                at = u_ptr.to(tl.pointer_type(tl.float16)) + r[None, :].to(tl.int64) * outputs
                column = panel * _PANEL + i
                sums0 = _dot(_half(at, column, outputs, known).to(tl.float32).to(dtype), low, sums0)
                sums1 = _dot(_half(at, column + 32, outputs, known).to(tl.float32).to(dtype), low, sums1)
                sums2 = _dot(_half(at, column + 64, outputs, known).to(tl.float32).to(dtype), low, sums2)
                sums3 = _dot(_half(at, column + 96, outputs, known).to(tl.float32).to(dtype), low, sums3)
                sums4 = _dot(_half(at, column + 128, outputs, known).to(tl.float32).to(dtype), low, sums4)
                sums5 = _dot(_half(at, column + 160, outputs, known).to(tl.float32).to(dtype), low, sums5)
                sums6 = _dot(_half(at, column + 192, outputs, known).to(tl.float32).to(dtype), low, sums6)
                sums7 = _dot(_half(at, column + 224, outputs, known).to(tl.float32).to(dtype), low, sums7)
            else:
                line = (panel * rank + r)[None, :]
                at = words + line * _WORDS + i[:, None]
                high_at = words + digit + line * (_WORDS // 2) + (i % (_WORDS // 2))[:, None]
                loaded = _load_words(at, high_at, digit, known[None, :], _BITS[kind])
                word = loaded[0]
                shift = (i // (_WORDS // 2)).to(tl.int16)[:, None]
                zero_low = zero.to(tl.float32)
                zero_upper = upper_zero.to(tl.float32)
                if QUICK and _BITS[kind] == 2:
                    zero_low += _BIAS
                    zero_upper += _BIAS
                low = (t * scale.to(tl.float32)[:, None]).to(dtype)
                upper = (t * upper_scale.to(tl.float32)[:, None]).to(dtype)
                less_low += low.to(tl.float32) * zero_low[:, None]
                less_upper += upper.to(tl.float32) * zero_upper[:, None]
                word, sums0 = _expand_plane(
                    word, loaded, shift, low, sums0, 0, _BITS[kind], QUICK and _BITS[kind] == 2
                )
                word, sums1 = _expand_plane(
                    word, loaded, shift, low, sums1, 1, _BITS[kind], QUICK and _BITS[kind] == 2
                )
                word, sums2 = _expand_plane(
                    word, loaded, shift, low, sums2, 2, _BITS[kind], QUICK and _BITS[kind] == 2
                )
                word, sums3 = _expand_plane(
                    word, loaded, shift, low, sums3, 3, _BITS[kind], QUICK and _BITS[kind] == 2
                )
                word, sums4 = _expand_plane(
                    word, loaded, shift, upper, sums4, 4, _BITS[kind], QUICK and _BITS[kind] == 2
                )
                word, sums5 = _expand_plane(
                    word, loaded, shift, upper, sums5, 5, _BITS[kind], QUICK and _BITS[kind] == 2
                )
                word, sums6 = _expand_plane(
                    word, loaded, shift, upper, sums6, 6, _BITS[kind], QUICK and _BITS[kind] == 2
                )
                word, sums7 = _expand_plane(
                    word, loaded, shift, upper, sums7, 7, _BITS[kind], QUICK and _BITS[kind] == 2
                )
        position += (rank + _BLOCK_R - 1) // _BLOCK_R * _BLOCK_R
    low_less = tl.sum(less_low, axis=0)[None, :]
    upper_less = tl.sum(less_upper, axis=0)[None, :]
    at = out_ptr + row[None, :] * out_stride + first_column
    column = panel * _PANEL + i
    _add(at, column, outputs, here, sums0 - low_less)
    _add(at, column + 32, outputs, here, sums1 - low_less)
    _add(at, column + 64, outputs, here, sums2 - low_less)
    _add(at, column + 96, outputs, here, sums3 - low_less)
    _add(at, column + 128, outputs, here, sums4 - upper_less)
    _add(at, column + 160, outputs, here, sums5 - upper_less)
    _add(at, column + 192, outputs, here, sums6 - upper_less)
    _add(at, column + 224, outputs, here, sums7 - upper_less)


@triton.jit
def _half(at, column, outputs, known):
    """float16 [WORDS, BLOCK_R] of a 16-bit group."""
    return tl.load(at + column[:, None], mask=known[None, :] & (column < outputs)[:, None], other=0.0)


@triton.jit
def _add(at, column, outputs, here, sums):
    mask = here[None, :] & (column < outputs)[:, None]
    old = tl.load(at + column[:, None], mask=mask, other=0.0).to(tl.float32)
    tl.store(at + column[:, None], (old + sums).to(at.dtype.element_ty), mask=mask)


def shrink(
    x: torch.Tensor,  # [T, K]
    arena: torch.Tensor,
    table: torch.Tensor,
    tiles: Tiles,
    plan: Plan,
    scratch: Scratch,
) -> None:
    num_rows, inputs = x.shape
    pdl = _dependent_launches(x.device)
    groups = table.shape[1] // layout.PER_GROUP
    _shrink[scratch.max_rank // layout.RANK_BLOCK, plan.splits, tiles.max_tiles](
        x,
        arena,
        table,
        tiles.tiles,
        tiles.order,
        scratch.shrunk,
        scratch.pieces,
        scratch.arrived,
        num_rows,
        inputs,
        x.stride(0),
        WIDTH=table.shape[1],
        GROUPS=groups,
        GROUPS_UP=triton.next_power_of_2(groups),
        MAX_RANK=scratch.max_rank,
        SPLITS=plan.splits,
        CHUNK=plan.chunk,
        BLOCK_M=tiles.block,
        STAGES=plan.shrink_stages,
        QUICK=_quick_codes(x),
        PDL=pdl,
        num_warps=plan.shrink_warps,
        **({"launch_pdl": True} if pdl else {}),
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
    pdl = _dependent_launches(out.device)
    groups = table.shape[1] // layout.PER_GROUP
    panels = sum(-(-outputs // layout.PANEL) for outputs in slices)
    _expand[panels, tiles.max_tiles](
        out,
        arena,
        table,
        tiles.tiles,
        tiles.order,
        scratch.shrunk,
        out.stride(0),
        SLICES=slices,
        WIDTH=table.shape[1],
        GROUPS=groups,
        GROUPS_UP=triton.next_power_of_2(groups),
        MAX_RANK=scratch.max_rank,
        BLOCK_M=tiles.block,
        STAGES=plan.expand_stages,
        QUICK=_quick_codes(out),
        PDL=pdl,
        num_warps=plan.expand_warps,
        **({"launch_pdl": True} if pdl else {}),
    )


def _quick_codes(values: torch.Tensor) -> bool:
    """Whether two bits are decoded by assembly, which the interpreter does not know."""
    return values.dtype == torch.bfloat16 and not triton.knobs.runtime.interpret


@functools.cache
def _dependent_launches(device: torch.device) -> bool:
    """Whether a launch may begin before the one it depends on has ended (Hopper and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
