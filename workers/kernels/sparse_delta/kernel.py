"""Sparse deltas on a GPU: weights stay packed until they are in registers, where tensor cores use them.

A program computes 2 * PAIRS output rows (rows that share mask bytes) of one tile of the batch. Weights are
the product's first operand and the batch's rows its second, so that 16 rows suffice for tensor cores. The
four positions of a group of columns are four products over the same groups (`x[:, j::4]`, j = 0..3): expanded
weights need not be interleaved into columns.

In decoding, bfloat16 weights keep an excess that depends on their position. Subtracting it would cost an
instruction for every two weights, and instructions, not memory, limit these kernels. Instead the kernel
subtracts the excess times the batch's rows from the sums, which takes half as many products again. Sums of
256 columns that are at most 136 times too large lose no precision of bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from profiler.variants.sparse import ALIGNED_COLUMNS
from workers.kernels.low_rank.kernel import dot
from workers.kernels.rows import LARGE_BLOCK, Rows, Tiles
from workers.kernels.sparse_delta.layout import FIELDS, GROUP

HALF_DTYPES = (torch.bfloat16, torch.float16)
ALIGNED_GROUPS = ALIGNED_COLUMNS // GROUP
# For one delta: more programs would fill an H200 sooner with one delta, but cost more with eight deltas.
ENOUGH_PROGRAMS = 128
KEPT_COUNTERS = 1 << 16
MAX_ROWS_OF_EXCESS = 16
MAX_DECODED_TWICE = 32  # rows of a batch


@triton.constexpr_function
def _excess(position: int, bits: int) -> int:
    """A weight's excess over its value at each position of a group, where the excess stays."""
    return 128 + 8 if bits == 4 else (128, 32, 8, 8)[position] + 2


@triton.jit
def _weight(value, J: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, EXCESS: tl.constexpr):
    if EXCESS:
        value += _excess(J, BITS)
    return value.to(tl.float32).to(DTYPE)  # the interpreter has no other way to bfloat16


@triton.jit
def _four_bits_plain(first, second, masks, DTYPE: tl.constexpr, EXCESS: tl.constexpr):
    """Do the same as the PTX below, in Triton: for other types, and for the interpreter."""
    a0, a1, a2, a3 = _four_bits_of_row(first, masks & 15, DTYPE, EXCESS)
    b0, b1, b2, b3 = _four_bits_of_row(second, masks >> 4, DTYPE, EXCESS)
    return a0, a1, a2, a3, b0, b1, b2, b3


@triton.jit
def _four_bits_of_row(values, mask, DTYPE: tl.constexpr, EXCESS: tl.constexpr):
    low = (values & 15).to(tl.int32) - 8
    high = (values >> 4).to(tl.int32) - 8
    zero = tl.zeros_like(low)
    d0 = tl.where((mask & 1) != 0, low, zero)
    d1 = tl.where((mask & 2) != 0, tl.where((mask & 1) != 0, high, low), zero)
    d2 = tl.where((mask & 4) != 0, tl.where((mask & 8) != 0, low, high), zero)
    d3 = tl.where((mask & 8) != 0, high, zero)
    return (_weight(d0, 0, 4, DTYPE, EXCESS), _weight(d1, 1, 4, DTYPE, EXCESS),
            _weight(d2, 2, 4, DTYPE, EXCESS), _weight(d3, 3, 4, DTYPE, EXCESS))  # fmt: skip


@triton.jit
def _two_bits_plain(codes, DTYPE: tl.constexpr, EXCESS: tl.constexpr):
    codes = codes.to(tl.int32)
    return (_weight((codes & 3) - 2, 0, 2, DTYPE, EXCESS),
            _weight(((codes >> 2) & 3) - 2, 1, 2, DTYPE, EXCESS),
            _weight(((codes >> 4) & 3) - 2, 2, 2, DTYPE, EXCESS),
            _weight((codes >> 6) - 2, 3, 2, DTYPE, EXCESS))  # fmt: skip


def _four_bits_ptx(magic: int, finish: str) -> str:
    """PTX that decodes four groups of two rows at a time, a byte each.

    A code's byte below the magic number's high byte is the float `magic + code`; dropped values have code 8.
    `finish` subtracts the excess, or is empty.
    """
    lines = [
        ".reg .b32 v0, v1, m0, m1, m2, m3, t, d, magic, eights;",
        f"mov.b32 magic, {magic:#x}; mov.b32 eights, 0x08080808;",
    ]
    for row in range(2):
        values, shift = f"${16 + row}", 4 * row
        lines += [f"and.b32 v0, {values}, 0x0f0f0f0f; shr.u32 t, {values}, 4; and.b32 v1, t, 0x0f0f0f0f;"]
        for j in range(4):  # a mask's bit becomes its byte's sign, and the sign fills the byte
            by = 7 - j - shift
            lines += [f"shl.b32 t, $18, {by}; prmt.b32 m{j}, t, 0, 0xba98;"]
        picks = (
            "lop3.b32 d, m0, v0, eights, 0xca;",
            "lop3.b32 t, m0, v1, v0, 0xca; lop3.b32 d, m1, t, eights, 0xca;",
            "lop3.b32 t, m3, v0, v1, 0xca; lop3.b32 d, m2, t, eights, 0xca;",
            "lop3.b32 d, m3, v1, eights, 0xca;",
        )
        for j, pick in enumerate(picks):
            even, odd = f"${8 * row + 2 * j}", f"${8 * row + 2 * j + 1}"
            lines += [
                pick,
                f"prmt.b32 {even}, d, magic, 0x4140; prmt.b32 {odd}, d, magic, 0x4342;",
                *(finish.format(register) for register in (even, odd)),
            ]
    return "{\n" + "\n".join(lines) + "\n}"


def _two_bits_ptx(magics: Sequence[int], finish: Sequence[str]) -> str:
    """PTX that decodes four groups of a row at a time, a byte each. `magics`, `finish`: for codes at bits 0,
    2, 4 and 4.
    """
    lines = [
        ".reg .b32 lo, hi, low, high, f, s;",
        "prmt.b32 lo, $8, 0, 0x4140; prmt.b32 hi, $8, 0, 0x4342;",
        "shr.u32 low, lo, 2; shr.u32 high, hi, 2;",
    ]
    for j, mask in enumerate((0x00030003, 0x000C000C, 0x00300030, 0x00300030)):
        sources = ("lo", "hi") if j < 3 else ("low", "high")
        for register, source in zip((f"${2 * j}", f"${2 * j + 1}"), sources, strict=True):
            lines += [
                f"lop3.b32 {register}, {source}, {mask:#x}, {_twice(magics[j]):#x}, 0xea;",
                finish[j].format(register),
            ]
    return "{\n" + "\n".join(lines) + "\n}"


def _twice(half: int) -> int:
    return half << 16 | half


def _less(kind: str, excess: int) -> str:
    return f"mov.b32 t, {_twice(excess):#x}; sub.{kind} {{0}}, {{0}}, t;"


def _scaled(kind: str, steps: Sequence[tuple[int, int]]) -> list[str]:
    """The factor and summand for codes at bits 0, 2, 4 and 4."""
    return [
        f"mov.b32 f, {_twice(factor):#x}; mov.b32 s, {_twice(less):#x}; fma.rn.{kind} {{0}}, {{0}}, f, s;"
        for factor, less in steps
    ]


# For bfloat16 in excess: 128 + c, 32 + c, 8 + c and 8 + c.
FOUR_BITS_EXCESS = tl.constexpr(_four_bits_ptx(0x43434343, ""))
TWO_BITS_EXCESS = tl.constexpr(_two_bits_ptx((0x4300, 0x4200, 0x4100, 0x4100), [""] * 4))
FOUR_BITS_BF16 = tl.constexpr(_four_bits_ptx(0x43434343, _less("bf16x2", 0x4308)))
FOUR_BITS_FP16 = tl.constexpr(_four_bits_ptx(0x64646464, _less("f16x2", 0x6408)))
# 128 + c - 130, (128 + 4c) / 4 - 34, (128 + 16c) / 16 - 10; then the same with 1024.
_BF16_STEPS = ((0x3F80, 0xC302), (0x3E80, 0xC208), (0x3D80, 0xC120), (0x3D80, 0xC120))
_FP16_STEPS = ((0x3C00, 0xE402), (0x3400, 0xDC08), (0x2C00, 0xD420), (0x2C00, 0xD420))
TWO_BITS_BF16 = tl.constexpr(_two_bits_ptx((0x4300,) * 4, _scaled("bf16x2", _BF16_STEPS)))
TWO_BITS_FP16 = tl.constexpr(_two_bits_ptx((0x6400,) * 4, _scaled("f16x2", _FP16_STEPS)))
FOUR_BITS_REGISTERS = tl.constexpr(",".join(["=&r"] * 16 + ["r"] * 3))
TWO_BITS_REGISTERS = tl.constexpr(",".join(["=&r"] * 8 + ["r"]))


@triton.jit
def four_bits(first, second, masks, DTYPE: tl.constexpr, FAST: tl.constexpr, EXCESS: tl.constexpr):
    """Positions 0..3 of each group, of a pair's first row and then its second: 8 x [PAIRS, GROUPS]."""
    if not FAST:
        weights = _four_bits_plain(first, second, masks, DTYPE, EXCESS)
    elif tl.bfloat16 == DTYPE:
        weights = tl.inline_asm_elementwise(
            FOUR_BITS_EXCESS if EXCESS else FOUR_BITS_BF16, FOUR_BITS_REGISTERS, [first, second, masks],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                   tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=4,
        )  # fmt: skip
    else:
        weights = tl.inline_asm_elementwise(
            FOUR_BITS_FP16, FOUR_BITS_REGISTERS, [first, second, masks],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16,
                   tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=4,
        )  # fmt: skip
    return weights


@triton.jit
def two_bits(codes, DTYPE: tl.constexpr, FAST: tl.constexpr, EXCESS: tl.constexpr):
    """Positions 0..3 of each group: 4 x [PAIRS, GROUPS]."""
    if not FAST:
        weights = _two_bits_plain(codes, DTYPE, EXCESS)
    elif tl.bfloat16 == DTYPE:
        weights = tl.inline_asm_elementwise(
            TWO_BITS_EXCESS if EXCESS else TWO_BITS_BF16, TWO_BITS_REGISTERS, [codes],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        weights = tl.inline_asm_elementwise(
            TWO_BITS_FP16, TWO_BITS_REGISTERS, [codes],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=4,
        )  # fmt: skip
    return weights


@triton.jit
def _columns(x_rows, groups, mask):
    """x[:, 4g + j] of the rows for j = 0..3, each [GROUPS, ROWS]. `x_rows`: pointers to the rows' starts."""
    if x_rows.dtype.element_ty.primitive_bitwidth == 16:
        # Four columns are one load of 8 bytes, split in registers.
        four = tl.load(x_rows.to(tl.pointer_type(tl.int64))[None, :] + groups[:, None], mask=mask, other=0)
        kind = x_rows.dtype.element_ty
        x0 = four.to(tl.int16).to(kind, bitcast=True)
        x1 = (four >> 16).to(tl.int16).to(kind, bitcast=True)
        x2 = (four >> 32).to(tl.int16).to(kind, bitcast=True)
        x3 = (four >> 48).to(tl.int16).to(kind, bitcast=True)
    else:
        at = x_rows[None, :] + 4 * groups[:, None]
        x0 = tl.load(at, mask=mask, other=0)
        x1 = tl.load(at + 1, mask=mask, other=0)
        x2 = tl.load(at + 2, mask=mask, other=0)
        x3 = tl.load(at + 3, mask=mask, other=0)
    return x0, x1, x2, x3


@triton.jit
def _dots(d0, d1, d2, d3, x0, x1, x2, x3):
    sum = tl.zeros((d0.shape[0], x0.shape[1]), tl.float32)
    sum = dot(d0, x0, sum)
    sum = dot(d1, x1, sum)
    sum = dot(d2, x2, sum)
    return dot(d3, x3, sum)


@triton.jit
def _excess_of(codes, J: tl.constexpr, BITS: tl.constexpr, FAST: tl.constexpr):
    """[PAIRS, GROUPS]: the excess everywhere."""
    if FAST:
        # The codes are a formal operand, so the result has the weights' register layout: `x` is loaded only
        # once.
        move: tl.constexpr = _constant_ptx(J, BITS)
        excess = tl.inline_asm_elementwise(move, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        excess = tl.full(codes.shape, _excess(J, BITS), tl.float32).to(tl.bfloat16)
    return excess


@triton.constexpr_function
def _constant_ptx(position: int, bits: int) -> str:
    half = {136: 0x4308, 130: 0x4302, 34: 0x4208, 10: 0x4120}[_excess(position, bits)]
    return f"mov.b32 $0, {half * 0x10001:#x}; mov.b32 $1, {half * 0x10001:#x};"


@triton.jit
def _sums(arena, values_at, masks_at, scales_at, num_scales, pair, half, outputs, x_rows, valid, num_groups,
          first_block, last_block, blocks_per_scale, BITS: tl.constexpr, DTYPE: tl.constexpr,
          FAST: tl.constexpr, ALIGNED: tl.constexpr, PAIRS: tl.constexpr, GROUPS: tl.constexpr,
          ROWS: tl.constexpr, EXCESS: tl.constexpr):  # fmt: skip
    """The products of a pair's first row and of its second row, each [PAIRS, ROWS]."""
    per_scale = num_groups // num_scales
    if ALIGNED:
        per_scale = tl.multiple_of(per_scale, 16)
    values = arena + values_at
    masks = arena + masks_at
    has_first = pair < half
    has_second = half + pair < outputs
    first_scales = (arena + scales_at).to(tl.pointer_type(tl.float16)) + pair
    first_sum = tl.zeros((PAIRS, ROWS), tl.float32)
    second_sum = tl.zeros((PAIRS, ROWS), tl.float32)
    scale = first_block // blocks_per_scale
    within = first_block % blocks_per_scale
    next_first = tl.load(first_scales + scale * outputs, mask=has_first, other=0)
    next_second = tl.load(first_scales + half + scale * outputs, mask=has_second, other=0)
    for _ in tl.range(first_block, last_block):
        groups = scale * per_scale + within * GROUPS + tl.arange(0, GROUPS)
        inside = groups < (scale + 1) * per_scale
        at = pair.to(tl.int64)[:, None] * num_groups + groups[None, :]
        first = tl.load(values + at, mask=has_first[:, None] & inside[None, :], other=0)
        second = tl.load(
            values + half.to(tl.int64) * num_groups + at, mask=has_second[:, None] & inside[None, :], other=0
        )
        if BITS == 4:
            mask = tl.load(masks + at, mask=has_first[:, None] & inside[None, :], other=0)
        x0, x1, x2, x3 = _columns(x_rows, groups, inside[:, None] & valid[None, :])
        # Load the next block's scales one step ahead: the pipeliner moves only the operands of products.
        first_scale = next_first.to(tl.float32)[:, None]
        second_scale = next_second.to(tl.float32)[:, None]
        within += 1
        if within == blocks_per_scale:
            within = 0
            scale += 1
        next_first = tl.load(first_scales + scale * outputs, mask=has_first & (scale < num_scales), other=0)
        next_second = tl.load(
            first_scales + half + scale * outputs, mask=has_second & (scale < num_scales), other=0
        )
        if BITS == 4:
            a0, a1, a2, a3, b0, b1, b2, b3 = four_bits(first, second, mask, DTYPE, FAST, EXCESS)
        else:
            a0, a1, a2, a3 = two_bits(first, DTYPE, FAST, EXCESS)
            b0, b1, b2, b3 = two_bits(second, DTYPE, FAST, EXCESS)
        first_product = _dots(a0, a1, a2, a3, x0, x1, x2, x3)
        second_product = _dots(b0, b1, b2, b3, x0, x1, x2, x3)
        if EXCESS:
            excess = _dots(
                _excess_of(first, 0, BITS, FAST), _excess_of(first, 1, BITS, FAST),
                _excess_of(first, 2, BITS, FAST), _excess_of(first, 3, BITS, FAST), x0, x1, x2, x3,
            )  # fmt: skip
            first_product -= excess
            second_product -= excess
        first_sum += first_product * first_scale
        second_sum += second_product * second_scale
    return first_sum, second_sum


@triton.jit
def _add(out, stride, rows, valid, columns, inside, sum):
    """out[rows, columns] += sum^T. `sum`: [COLUMNS, ROWS]."""
    at = out + rows.to(tl.int64)[None, :] * stride + columns[:, None]
    mask = inside[:, None] & valid[None, :]
    before = tl.load(at, mask=mask, other=0)
    tl.store(at, (before.to(tl.float32) + sum).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["max_tiles"])  # it takes many values
def _sbmm(out, x, partials, counters, arena, table, tiles, order, out_stride, x_stride, num_groups, max_tiles,
          WIDTH: tl.constexpr, FIELDS: tl.constexpr, SLICES: tl.constexpr, FAST: tl.constexpr,
          ALIGNED: tl.constexpr, PAIRS: tl.constexpr, GROUPS: tl.constexpr, CUTS: tl.constexpr,
          ROWS: tl.constexpr, SPLITS: tl.constexpr, EXCESS: tl.constexpr):  # fmt: skip
    # Tiles come first: tiles of one slot run together and read its weights from memory once.
    cut = tl.program_id(0) % (max_tiles * CUTS)
    split = (tl.program_id(0) // (max_tiles * CUTS)) % SPLITS
    part = tl.program_id(0) // (max_tiles * CUTS * SPLITS)
    tile = tiles + 3 * (cut // CUTS)
    first_row = (cut % CUTS) * ROWS
    slot = tl.load(tile)
    count = tl.load(tile + 2) - first_row
    if (slot < 0) | (count <= 0):
        return

    part_of_slice = part
    slice = 0
    column = 0
    outputs = SLICES[0]
    for i in tl.static_range(len(SLICES) - 1):
        parts = (((SLICES[i] + 1) // 2) + PAIRS - 1) // PAIRS
        if (slice == i) & (part_of_slice >= parts):
            part_of_slice -= parts
            slice = i + 1
            column += SLICES[i]
            outputs = SLICES[i + 1]
    fields = table + slot.to(tl.int64) * WIDTH + slice * FIELDS
    bits = tl.load(fields)
    if bits == 0:
        return

    values_at = tl.multiple_of(tl.load(fields + 1), 128)
    masks_at = tl.multiple_of(tl.load(fields + 2), 128)
    scales_at = tl.multiple_of(tl.load(fields + 3), 128)
    num_scales = tl.load(fields + 4).to(tl.int32)
    half = (outputs + 1) // 2
    pair = part_of_slice * PAIRS + tl.arange(0, PAIRS)
    valid = tl.arange(0, ROWS) < count
    rows = tl.load(order + tl.load(tile + 1) + first_row + tl.arange(0, ROWS), mask=valid, other=0)
    x_rows = x + rows.to(tl.int64) * x_stride
    blocks_per_scale = tl.cdiv(num_groups // num_scales, GROUPS)
    blocks = num_scales * blocks_per_scale
    per_split = tl.cdiv(blocks, SPLITS)
    first_block = split * per_split
    last_block = tl.minimum(first_block + per_split, blocks)
    if bits == 4:
        first_sum, second_sum = _sums(
            arena, values_at, masks_at, scales_at, num_scales, pair, half, outputs, x_rows, valid, num_groups,
            first_block, last_block, blocks_per_scale, 4, x.dtype.element_ty, FAST, ALIGNED, PAIRS, GROUPS,
            ROWS, EXCESS,
        )  # fmt: skip
    else:
        first_sum, second_sum = _sums(
            arena, values_at, masks_at, scales_at, num_scales, pair, half, outputs, x_rows, valid, num_groups,
            first_block, last_block, blocks_per_scale, 2, x.dtype.element_ty, FAST, ALIGNED, PAIRS, GROUPS,
            ROWS, EXCESS,
        )  # fmt: skip

    if SPLITS > 1:
        # [parts, cuts, SPLITS, 2, ROWS, PAIRS]: every program stores its sums; the last program to arrive
        # adds them up, always in the order of the splits.
        job = part * max_tiles * CUTS + cut
        sums = partials + (job.to(tl.int64) * SPLITS) * (2 * ROWS * PAIRS)
        cell = tl.arange(0, ROWS)[None, :] * PAIRS + tl.arange(0, PAIRS)[:, None]
        mine = sums + split * (2 * ROWS * PAIRS) + cell
        tl.store(mine, first_sum, mask=valid[None, :])
        tl.store(mine + ROWS * PAIRS, second_sum, mask=valid[None, :])
        tl.debug_barrier()
        if tl.atomic_add(counters + job, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.debug_barrier()
        first_sum = tl.zeros((PAIRS, ROWS), tl.float32)
        second_sum = tl.zeros((PAIRS, ROWS), tl.float32)
        for other in tl.static_range(SPLITS):
            theirs = sums + other * (2 * ROWS * PAIRS) + cell
            first_sum += tl.load(theirs, mask=valid[None, :], other=0, cache_modifier=".cg")
            second_sum += tl.load(theirs + ROWS * PAIRS, mask=valid[None, :], other=0, cache_modifier=".cg")
        tl.store(counters + job, 0)
    columns = column + pair
    _add(out, out_stride, rows, valid, columns, pair < half, first_sum)
    _add(out, out_stride, rows, valid, columns + half, half + pair < outputs, second_sum)


@dataclass(frozen=True)
class Config:
    """How a launch divides its work.

    `pairs`, `rows`: pairs of output rows and rows of the batch per program. `groups`: groups of columns at a
    time. `splits`: programs that share one sum.
    """

    pairs: int
    groups: int
    rows: int
    splits: int
    warps: int
    stages: int
    registers: int | None = None  # at most, per thread


def config_for(num_rows: int, num_groups: int, slices: Sequence[int], block: int) -> Config:
    """The division, from sweeps on an H200.

    Decoding sums in one order for every batch size: groups and splits depend on the layer alone. So a row's
    result does not depend on the rest of the batch.
    """
    if block == LARGE_BLOCK:
        return Config(pairs=64, groups=32, rows=64, splits=1, warps=4, stages=3)
    blocks = triton.cdiv(num_groups, 64)
    splits = 1
    while splits < 8 and _parts(slices, 64) * splits < ENOUGH_PROGRAMS and blocks >= 8 * splits:
        splits *= 2
    if num_rows > MAX_DECODED_TWICE and splits == 1:  # wide enough for larger tiles of rows to be faster
        return Config(pairs=32, groups=64, rows=16, splits=1, warps=2, stages=2)
    return Config(pairs=64, groups=64, rows=8, splits=splits, warps=4, stages=3, registers=128)


def apply(
    x: torch.Tensor,  # [M, K]
    out: torch.Tensor,  # [M, sum(slices)]
    arena: torch.Tensor,
    table: torch.Tensor,
    rows: Rows,
    slices: Sequence[int],
    config: Config | None = None,
) -> None:
    if len(x) == 0:
        return
    for tiles in rows.tiles_by_count(len(x)):
        _launch(x, out, arena, table, tiles, slices, config)


def _launch(
    x: torch.Tensor,  # [M, K]
    out: torch.Tensor,  # [M, sum(slices)]
    arena: torch.Tensor,
    table: torch.Tensor,
    tiles: Tiles,
    slices: Sequence[int],
    config: Config | None,
) -> None:
    num_groups = x.shape[1] // GROUP
    config = config or config_for(len(x), num_groups, slices, tiles.block)
    cuts = triton.cdiv(tiles.block, config.rows)
    jobs = tiles.max_tiles * cuts * _parts(slices, config.pairs)
    sums = jobs * config.splits * 2 * config.rows * config.pairs if config.splits > 1 else 0
    _sbmm[(jobs * config.splits,)](
        out,
        _whole_groups(x),
        torch.empty(sums, dtype=torch.float32, device=x.device),
        _counters(jobs, x.device) if config.splits > 1 else None,
        arena,
        table,
        tiles.tiles,
        tiles.order,
        out.stride(0),
        _whole_groups(x).stride(0),
        num_groups,
        tiles.max_tiles,
        WIDTH=table.shape[1],
        FIELDS=FIELDS,
        SLICES=tuple(slices),
        FAST=x.dtype in HALF_DTYPES and not triton.knobs.runtime.interpret,  # the interpreter has no PTX
        ALIGNED=num_groups % ALIGNED_GROUPS == 0,
        PAIRS=config.pairs,
        GROUPS=config.groups,
        CUTS=cuts,
        ROWS=config.rows,
        SPLITS=config.splits,
        # With many rows, the extra products cost more than subtracting from weights.
        EXCESS=x.dtype == torch.bfloat16 and config.rows <= MAX_ROWS_OF_EXCESS,
        num_warps=config.warps,
        num_stages=config.stages,
        **({} if config.registers is None else {"maxnreg": config.registers}),
    )


def _parts(slices: Sequence[int], pairs: int) -> int:
    """The programs that one tile of rows needs, for one of the splits of a sum."""
    return sum(triton.cdiv(triton.cdiv(outputs, 2), pairs) for outputs in slices)


def _whole_groups(x: torch.Tensor) -> torch.Tensor:
    """`x` in a layout in which one load reads a group of columns."""
    return x if x.stride(1) == 1 and x.stride(0) % GROUP == 0 and x.data_ptr() % 8 == 0 else x.contiguous()


_kept_counters: dict[torch.device, torch.Tensor] = {}


def _counters(jobs: int, device: torch.device) -> torch.Tensor:
    """int32 zeros, one per job. Every launch leaves them zero again, so one set serves all launches.

    Launches that share them must not overlap; the launches of one engine follow one another.
    """
    counters = _kept_counters.get(device)
    if counters is None or len(counters) < jobs:
        counters = torch.zeros(max(jobs, KEPT_COUNTERS), dtype=torch.int32, device=device)
        if not (counters.is_cuda and torch.cuda.is_current_stream_capturing()):
            # during capture they are not kept: each replay of the graph zeroes them
            _kept_counters[device] = counters
    return counters
