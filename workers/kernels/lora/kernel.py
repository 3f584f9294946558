"""LoRA in two Triton launches for all variants and slices of a batch.

Shrink computes t = x A^T in pieces of K, in float32. The last of the programs that share a tile sums the
pieces, in their order, not in the order of arrival. Expand adds t B^T to the output. The pieces depend on the
linear alone, so a row's result does not depend on the rest of the batch. Grids depend on shapes alone: a
captured CUDA graph stays valid for every later batch.

A batch may have rows of an adapter whose arrays are still on the way to the device. Its table row says so,
and both launches wait for that row. Only copies end the wait, and no kernel can delay a copy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workers.kernels import low_rank
from workers.kernels.lora import layout
from workers.kernels.lora.plan import LOW_RANKS, Plan, Scratch
from workers.kernels.low_rank.kernel import INTERPRETED, dot, tile_at
from workers.kernels.rows import SMALL_BLOCK, Tiles

_HEAD = tl.constexpr(layout.HEAD)
_PER_SLICE = tl.constexpr(layout.PER_SLICE)
_TOTAL_RANK = tl.constexpr(layout.TOTAL_RANK)
_PAUSE_NS = tl.constexpr(200)
# In tiles of up to this many rows, adapters of higher ranks leave the cache first: they are hardly read
# twice.
_SMALL, _LOW = tl.constexpr(SMALL_BLOCK), tl.constexpr(LOW_RANKS)


@triton.jit
def _rank_once_there(described):
    """Wait until the arrays that a table row describes are on the device; returns the row's total rank."""
    at = described + _TOTAL_RANK
    rank = tl.load(at)
    if rank < 0:
        while rank < 0:
            if not INTERPRETED:
                tl.inline_asm_elementwise(
                    "nanosleep.u32 $1; mov.u32 $0, $1;",
                    "=r,r",
                    [_PAUSE_NS],
                    dtype=tl.int32,
                    is_pure=False,
                    pack=1,
                )
            rank = tl.load(at, volatile=True)
        rank = tl.atomic_add(at, 0, sem="acquire", scope="sys")  # later reads come after this read
    return rank


@triton.jit(do_not_specialize=["num_rows"])  # it takes many values
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
    MAX_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    split = tl.program_id(0)
    tile = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot, first, count = tile_at(tiles_ptr, tile)
    if slot < 0:
        return
    described = table_ptr + slot.to(tl.int64) * WIDTH
    rank = _rank_once_there(described)
    rank_start = tl.program_id(1) * BLOCK_R
    if rank_start >= rank:
        return
    a_ptr = (arena_ptr + tl.multiple_of(tl.load(described), 128)).to(x_ptr.dtype)
    m = tl.arange(0, BLOCK_M)
    row = tl.load(order_ptr + first + m, mask=m < count, other=0).to(tl.int64)
    r = rank_start + tl.arange(0, BLOCK_R)
    k = split * CHUNK + tl.arange(0, BLOCK_K)
    x_at = x_ptr + row[:, None] * x_stride + k[None, :]
    a_at = a_ptr + r[:, None].to(tl.int64) * inputs + k[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    POLICY: tl.constexpr = "evict_first" if BLOCK_M == _SMALL and MAX_RANK > _LOW else ""
    # A tile's rows past its end read row 0 and are not stored, so they need no mask.
    for step in tl.range(0, tl.minimum(CHUNK, inputs - split * CHUNK), BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            xs = tl.load(x_at + step)
            a = tl.load(a_at + step, mask=(r < rank)[:, None], other=0.0, eviction_policy=POLICY)
        else:
            inside = (k + step < inputs)[None, :]
            xs = tl.load(x_at + step, mask=inside, other=0.0)
            mask = (r < rank)[:, None] & inside
            a = tl.load(a_at + step, mask=mask, other=0.0, eviction_policy=POLICY)
        sums = dot(xs, tl.trans(a), sums)
    wanted = (m < count)[:, None] & (r < rank)[None, :]
    within = row[:, None] * MAX_RANK + r[None, :]
    if SPLITS == 1:
        tl.store(shrunk_ptr + within, sums, mask=wanted)
        return
    tl.store(pieces_ptr + split * num_rows * MAX_RANK + within, sums, mask=wanted)
    tl.debug_barrier()  # all of this program's stores come before its arrival
    arrived_at = arrived_ptr + tile * tl.num_programs(1) + tl.program_id(1)
    if tl.atomic_add(arrived_at, 1, sem="acq_rel") == SPLITS - 1:
        total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for piece in tl.static_range(SPLITS):
            at = pieces_ptr + piece * num_rows * MAX_RANK + within
            total += tl.load(at, mask=wanted, other=0.0, cache_modifier=".cg")
        tl.store(shrunk_ptr + within, total, mask=wanted)
        tl.store(arrived_at, 0)


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
    MAX_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    block = tl.program_id(0)
    tile = tl.program_id(1)
    slot, first, count = tile_at(tiles_ptr, tile)
    if slot < 0:
        # A program that ended without waiting would let this launch end before the launch it depends on.
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    # Find the block's slice; slices do not share blocks.
    index = 0
    outputs = 0
    column = 0
    n_start = 0
    blocks_before = 0
    columns_before = 0
    for s in tl.static_range(len(SLICES)):
        if block >= blocks_before:
            index = s
            outputs = SLICES[s]
            column = columns_before
            n_start = (block - blocks_before) * BLOCK_N
        blocks_before += (SLICES[s] + BLOCK_N - 1) // BLOCK_N
        columns_before += SLICES[s]
    whole = table_ptr + slot.to(tl.int64) * WIDTH
    _rank_once_there(whole)  # also here: this launch may begin before the shrink has ended
    described = whole + _HEAD + _PER_SLICE * index
    rank = tl.load(described + 2).to(tl.int32)
    if rank == 0:
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    b_ptr = (arena_ptr + tl.multiple_of(tl.load(described), 128)).to(out_ptr.dtype)
    rank_first = tl.load(described + 1)
    m = tl.arange(0, BLOCK_M)
    here = m < count
    row = tl.load(order_ptr + first + m, mask=here, other=0).to(tl.int64)
    n = n_start + tl.arange(0, BLOCK_N)
    inside = n < outputs
    r = tl.arange(0, BLOCK_R)
    b_at = b_ptr + r[:, None].to(tl.int64) * outputs + n[None, :]
    POLICY: tl.constexpr = "evict_first" if BLOCK_M == _SMALL and MAX_RANK > _LOW else ""
    b = tl.load(b_at, mask=(r < rank)[:, None] & inside[None, :], other=0.0, eviction_policy=POLICY)
    if PDL:
        tl.extra.cuda.gdc_wait()
    out_at = out_ptr + row[:, None] * out_stride + column + n[None, :]
    old = tl.load(out_at, mask=here[:, None] & inside[None, :], other=0.0)
    t_at = shrunk_ptr + row[:, None] * MAX_RANK + rank_first + r[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    start = 0
    while start < rank:
        t = tl.load(t_at + start, mask=here[:, None] & (start + r < rank)[None, :], other=0.0)
        sums = dot(t.to(b.dtype), b, sums)
        start += BLOCK_R
        left = (start + r < rank)[:, None] & inside[None, :]
        b = tl.load(b_at + start * outputs, mask=left, other=0.0, eviction_policy=POLICY)
    new = (old.to(tl.float32) + sums).to(out_ptr.dtype.element_ty)
    tl.store(out_at, new, mask=here[:, None] & inside[None, :])


def shrink(
    x: torch.Tensor,  # [T, K]
    arena: torch.Tensor,
    table: torch.Tensor,
    tiles: Tiles,
    plan: Plan,
    scratch: Scratch,
) -> None:
    num_rows, inputs = x.shape
    pdl = low_rank.dependent_launches(x.device)
    _shrink[plan.splits, -(-scratch.max_rank // plan.shrink_r), tiles.max_tiles](
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
        MAX_RANK=scratch.max_rank,
        SPLITS=plan.splits,
        CHUNK=plan.chunk,
        BLOCK_M=tiles.block,
        BLOCK_R=plan.shrink_r,
        BLOCK_K=plan.block_k,
        EVEN_K=inputs % plan.block_k == 0,
        STAGES=plan.shrink_stages,
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
    pdl = low_rank.dependent_launches(out.device)
    blocks = sum(-(-outputs // plan.block_n) for outputs in slices)
    _expand[blocks, tiles.max_tiles](
        out,
        arena,
        table,
        tiles.tiles,
        tiles.order,
        scratch.shrunk,
        out.stride(0),
        SLICES=slices,
        WIDTH=table.shape[1],
        MAX_RANK=scratch.max_rank,
        BLOCK_M=tiles.block,
        BLOCK_R=plan.expand_r,
        BLOCK_N=plan.block_n,
        PDL=pdl,
        num_warps=plan.expand_warps,
        **({"launch_pdl": True} if pdl else {}),
    )
