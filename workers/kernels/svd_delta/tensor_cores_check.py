"""Whether this process adds singular-value deltas in CUDA: only if results match plain arithmetic."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence

import numpy as np
import torch

from workers.kernels.rows import Rows
from workers.kernels.svd_delta import layout, reference, tensor_cores
from workers.kernels.svd_delta.layout import Matrix, RankGroup, Ranks
from workers.kernels.svd_delta.plan import Scratch
from workers.kernels.types import offsets, total_bytes, views

log = logging.getLogger(__name__)

SWITCH = "OSTINATO_SVD_TENSOR_CORES"  # 0: no
INPUTS = (700, 6272)  # a panel that is not full; and enough for a cluster of blocks
SLICES = (200, 16)  # two panels, and less than one
RANKS: tuple[tuple[Ranks, Ranks], ...] = (
    ({8: 2, 3: 4, 2: 570}, {2: 5}),  # more digits than a stage has
    ({16: 20, 2: 3}, {}),
    ({}, {4: 9, 16: 3}),
)
MAX_RANK = 1024
TOLERANCE = 0.02  # relative to a row's length; bfloat16 alone loses up to 0.004


@functools.cache
def chosen(dtype: torch.dtype) -> bool:
    """Whether CUDA serves activations of `dtype`.

    It does if the GPU is a Hopper (the only tested kind), SWITCH is not 0, and the kernels' results match
    plain arithmetic. If the results do not match, the log says why, and Triton serves.
    """
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    if not hopper or os.environ.get(SWITCH) == "0":
        return False
    if found := problem(dtype, torch.device("cuda", torch.cuda.current_device())):
        log.error("singular-value deltas are not added by CUDA kernels, but by slower kernels: %s", found)
    return not found


def problem(dtype: torch.dtype, device: torch.device) -> str | None:
    """None if the results are right for activations of `dtype`; else the error."""
    try:
        errors = {cut: error_of(cut, dtype, device) for cut in tensor_cores.CUTS}
    except (ImportError, OSError, RuntimeError) as e:
        return str(e)
    bad = {cut: error for cut, error in errors.items() if not error < TOLERANCE}  # NaN, too
    return f"results differ by {bad}" if bad else None


def error_of(cut: tensor_cores.Cut, dtype: torch.dtype, device: torch.device) -> float:
    """The largest error of a row, relative to its length, in batches of few rows and of more; or NaN."""
    random = torch.Generator().manual_seed(0)
    lost = []
    for inputs in INPUTS:
        stored = loaded(inputs, random)
        for of_rows in ([0, 1, 1, 2, -1], [0] * 9 + [1] * 3, [0] * 19 + [2] * 3):
            x = torch.randn(len(of_rows), inputs, generator=random).to(dtype)
            lost.append(_error(cut, x, of_rows, stored, device, random))
    return float(torch.stack(lost).max())


def _error(
    cut: tensor_cores.Cut,
    x: torch.Tensor,
    of_rows: Sequence[int],
    stored: tuple[torch.Tensor, torch.Tensor],
    device: torch.device,
    random: torch.Generator,
) -> torch.Tensor:
    """The largest relative error of a row in one batch. `stored`: the arena and its table, on the host."""
    rows, host = (Rows(len(of_rows), len(RANKS), where) for where in (device, torch.device("cpu")))
    for each in (rows, host):
        each.update(np.array(of_rows, np.int32))
    want = torch.randn(len(of_rows), sum(SLICES), generator=random)
    out, scratch = want.to(device, x.dtype), Scratch(len(of_rows), MAX_RANK, device, len(SLICES))
    scratch.shrunk.fill_(torch.nan)
    reference.apply(x, want, *stored, host, SLICES)
    arena, table = (each.to(device) for each in stored)
    tiles = rows.tiles(len(of_rows))
    tensor_cores.shrink(x.to(device), arena, table, tiles, cut, scratch)
    tensor_cores.expand(out, arena, table, tiles, SLICES, cut, scratch)
    lost: torch.Tensor = (out.float().cpu() - want).norm(dim=1) / want.norm(dim=1)
    return lost.max()


def loaded(inputs: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """An arena of random deltas, and its table, on the host."""
    parts = [layout.parts(inputs, SLICES, ranks) for ranks in RANKS]
    arena, table, start = torch.zeros(sum(map(total_bytes, parts)), dtype=torch.uint8), [], 0
    for ranks, own in zip(RANKS, parts, strict=True):
        delta = [
            [_group(bits, rank, inputs, outputs, random) for bits, rank in by_bits.items()]
            for by_bits, outputs in zip(ranks, SLICES, strict=True)
        ]
        layout.pack(delta, views(arena, own, start))
        table.append(layout.describe(ranks, offsets(own, start)))
        start += total_bytes(own)
    return arena, torch.tensor(table)


def _group(bits: int, rank: int, inputs: int, outputs: int, random: torch.Generator) -> RankGroup:
    return RankGroup(
        bits,
        _matrix(bits, rank, inputs, inputs**-0.5, random),
        _matrix(bits, rank, outputs, 0.1, random),
    )


def _matrix(bits: int, rank: int, columns: int, size: float, random: torch.Generator) -> Matrix:
    if bits == layout.HALF:
        return Matrix((size * torch.randn(rank, columns, generator=random)).half())
    codes, zeros = (
        torch.randint(1 << bits, (rank, count), generator=random).to(torch.uint8)
        for count in (columns, -(-columns // layout.GROUP))
    )
    scales = (0.5 + torch.rand(zeros.shape, generator=random)) * size * 3 / (1 << bits)
    return Matrix(codes, scales.half(), zeros)
