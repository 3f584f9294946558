"""Whether this process multiplies sparse deltas on sparse tensor cores: only if results match plain
arithmetic.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from workers.kernels.rows import LARGE_FROM, Rows, Run
from workers.kernels.sparse_delta import (
    layout,
    merged_rows,
    merging,
    reference,
    row_tiles,
    squares,
    tensor_cores,
)
from workers.kernels.sparse_delta.layout import Delta, Shape
from workers.kernels.types import offsets, total_bytes, views

log = logging.getLogger(__name__)

SWITCH = "OSTINATO_SPARSE_TENSOR_CORES"  # 0: no
SLICES = (64, 640)  # fewer strips than a block of threads may have, and more
SQUARES = 49  # per row: every warp goes around its ring, but not all warps have the same number
SCALES = (1, 7)  # per row, by slot: one for all squares, and several, with a boundary within a warp's part
TOLERANCE = 0.02  # relative to a row's length; bfloat16 alone loses up to 0.004
SORTED_PAIRS = tuple(i0 | i1 << 2 for i0, i1 in itertools.combinations(range(4), 2))


@functools.cache
def chosen(dtype: torch.dtype) -> bool:
    """Whether sparse deltas lie in squares in this process, for activations of `dtype`.

    They do if the GPU is a Hopper (the only tested kind), SWITCH is not 0, and the kernels' results match
    plain arithmetic. If the results do not match, the log says why, and Triton serves.
    """
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    if not hopper or os.environ.get(SWITCH) == "0":
        return False
    if found := problem(dtype, torch.device("cuda", torch.cuda.current_device())):
        log.error("sparse deltas are not multiplied on sparse tensor cores, but by slower kernels: %s", found)
    return not found


def problem(dtype: torch.dtype, device: torch.device) -> str | None:
    """None if the kernels work for activations of `dtype`; else the error."""
    try:
        errors: dict[Any, float] = {
            config: error_of(config, dtype, device) for config in tensor_cores.CONFIGS
        }
        errors["merged weights"] = error_of_merging(dtype, device)
        errors["merged rows"] = error_of_merged_rows(dtype, device)
    except (ImportError, OSError, RuntimeError) as e:
        return str(e)
    bad = {config: error for config, error in errors.items() if not error < TOLERANCE}  # NaN, too
    return f"results differ by {bad}" if bad else None


def error_of_merging(dtype: torch.dtype, device: torch.device) -> float:
    """The largest error of an output's merged weights, relative to their length; or NaN."""
    random = torch.Generator().manual_seed(0)
    arena, table = loaded(_slots(), random)
    base = (0.02 * torch.randn(sum(SLICES), SQUARES * squares.SIDE, generator=random)).to(dtype)
    lost = []
    layer = merging.Layer(base.to(device), arena.to(device), table.to(device), SLICES)
    for slot, fields in enumerate(table):
        want = reference.merged(base.float(), arena, fields, SLICES)
        for first in (0, squares.SIDE):
            into = base.new_empty(len(base) - first, base.shape[1], device=device)
            merging.merge(into, layer, slot, first)
            differ = (into.float().cpu() - want[first:]).norm(dim=1)
            lost.append((differ / want[first:].norm(dim=1)).max())
    return float(torch.stack(lost).max())


def error_of_merged_rows(dtype: torch.dtype, device: torch.device) -> float:
    """The largest error of a row, relative to its length; or NaN.

    The check covers tiles of every height of a product, and unused rows, which must be zero.
    """
    random = torch.Generator().manual_seed(0)
    arena, table = loaded(_slots(), random)
    runs = (Run(0, 5, 305), Run(1, 305, 435), Run(2, 500, 695))
    cut = torch.from_numpy(row_tiles.tiles(runs, 700))
    base = 0.02 * torch.randn(sum(SLICES), SQUARES * squares.SIDE, generator=random)
    x, bias = torch.randn(710, base.shape[1], generator=random).to(dtype), torch.randn(len(base))
    want, out = (torch.full((710, len(base)), math.nan) for _ in range(2))
    out = out.to(device, dtype)
    layer = merging.Layer(base.to(dtype).float(), arena, table, SLICES)
    merged_rows.apply(x.float(), want, bias.to(dtype).float(), layer, cut)
    there = merging.Layer(base.to(device, dtype), arena.to(device), table.to(device), SLICES)
    merged_rows.apply(x.to(device), out, bias.to(device, dtype), there, cut.to(device))
    differ = (out.float().cpu() - want).norm(dim=1)
    return float((differ / want.norm(dim=1).clamp_min(1.0)).max())


def error_of(config: tensor_cores.Config, dtype: torch.dtype, device: torch.device) -> float:
    """The largest error of a row, relative to its length, in batches of few rows and of many; or NaN."""
    random = torch.Generator().manual_seed(0)
    arena, table = loaded(_slots(), random)
    batches = ([0, 1, 1, 2, -1], [0] * 40 + [1] * 3, [0] * 70 + [1] * LARGE_FROM + [2] * 3)
    errors = [_error(config, dtype, device, arena, table, of_rows, random) for of_rows in batches]
    return float(torch.stack(errors).max())


def _error(
    config: tensor_cores.Config,
    dtype: torch.dtype,
    device: torch.device,
    arena: torch.Tensor,
    table: torch.Tensor,
    of_rows: Sequence[int],
    random: torch.Generator,
) -> torch.Tensor:
    """The largest relative error of a row in one batch."""
    rows, host = (Rows(len(of_rows), len(table), where) for where in (device, torch.device("cpu")))
    for each in (rows, host):
        each.update(np.array(of_rows, np.int32))
    x = torch.randn(len(of_rows), SQUARES * squares.SIDE, generator=random).to(dtype)
    want = torch.randn(len(of_rows), sum(SLICES), generator=random)
    out = want.to(device, dtype)
    reference.apply(x, want, arena, table, host, SLICES)
    tensor_cores.apply(x.to(device), out, arena.to(device), table.to(device), rows, SLICES, config)
    lost: torch.Tensor = (out.float().cpu() - want).norm(dim=1) / want.norm(dim=1)
    return lost.max()


def _slots() -> list[list[Shape | None]]:
    """Slots with 4 bits, with 2 bits, and one that leaves a slice unchanged."""
    inputs = SQUARES * squares.SIDE
    both: list[list[Shape | None]] = [
        [Shape(outputs, inputs, bits, scales, squares=True) for outputs in SLICES]
        for bits, scales in zip((4, 2), SCALES, strict=True)
    ]
    return [*both, [None, both[0][1]]]


def loaded(
    slots: Sequence[Sequence[Shape | None]], random: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """An arena of random deltas, and its table, on the host."""
    parts = [layout.parts(shapes) for shapes in slots]
    arena, table, start = torch.zeros(sum(map(total_bytes, parts)), dtype=torch.uint8), [], 0
    for shapes, own in zip(slots, parts, strict=True):
        deltas = [None if shape is None else _random(shape, random) for shape in shapes]
        layout.pack(deltas, views(arena, own, start))
        table.append(layout.describe(shapes, offsets(own, start)))
        start += total_bytes(own)
    return arena, torch.tensor(table)


def _random(shape: Shape, random: torch.Generator) -> Delta:
    eighths = shape.inputs // 8
    pairs = torch.tensor(SORTED_PAIRS, dtype=torch.uint8)
    low, high = (pairs[torch.randint(6, (shape.outputs, eighths), generator=random)] for _ in range(2))
    columns = shape.inputs // 4 if shape.bits == 4 else eighths
    values = torch.randint(256, (shape.outputs, columns), generator=random, dtype=torch.uint8)
    scales = 0.005 + 0.01 * torch.rand(shape.outputs, shape.scales, generator=random)
    return Delta(values, low | high << 4, scales.half())
