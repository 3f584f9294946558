"""Whether the product on sparse tensor cores gives here what plain arithmetic gives."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from workers.kernels.rows import LARGE_FROM, Rows
from workers.kernels.sparse_delta import layout, reference, tensor_cores
from workers.kernels.sparse_delta.layout import Delta, Shape
from workers.kernels.types import offsets, total_bytes, views

SLICES, INPUTS = (64, 640), 576  # fewer strips than a block of threads may have, and more
TOLERANCE = 0.02  # of a row's length; bfloat16 alone loses up to 0.004
SORTED_PAIRS = tuple(i0 | i1 << 2 for i0, i1 in itertools.combinations(range(4), 2))


def problem() -> str | None:
    """None if it does; else what is wrong. Takes less than a second of a GPU that has it compiled."""
    try:
        errors = {
            (config, dtype): error_of(config, dtype)
            for config in tensor_cores.CONFIGS
            for dtype in tensor_cores.DTYPES
        }
    except (ImportError, RuntimeError) as e:
        return str(e)
    bad = {key: error for key, error in errors.items() if not error < TOLERANCE}
    return f"results differ by {bad}" if bad else None


def error_of(config: tensor_cores.Config, dtype: torch.dtype) -> float:
    """The largest error of a row, relative to its length, over batches of few rows and of many."""
    device = torch.device("cuda", torch.cuda.current_device())
    random = torch.Generator().manual_seed(0)
    shapes = [[Shape(outputs, INPUTS, bits, 9, squares=True) for outputs in SLICES] for bits in (4, 2)]
    arena, table = loaded(shapes, random)
    worst = 0.0
    for slots in ([0, 1, 1, -1], [0] * 40 + [1] * 3, [0] * 100 + [1] * LARGE_FROM):
        of_rows = torch.tensor(slots, dtype=torch.int32)
        rows, host = Rows(len(slots), 2, device), Rows(len(slots), 2, torch.device("cpu"))
        x = torch.randn(len(slots), INPUTS, generator=random).to(dtype)
        want = torch.zeros(len(slots), sum(SLICES))
        for each in (rows, host):
            each.update(of_rows.numpy())
        reference.apply(x, want, arena, table, host, SLICES)
        out = torch.zeros(len(slots), sum(SLICES), dtype=dtype, device=device)
        tensor_cores.apply(x.to(device), out, arena.to(device), table.to(device), rows, SLICES, config)
        lost = (out.float().cpu() - want).norm(dim=1) / want.norm(dim=1).clamp_min(1e-6)
        worst = max(worst, float(lost.max()))
    return worst


def loaded(slots: Sequence[Sequence[Shape]], random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """An arena of random deltas, and its table, on the host."""
    parts = [layout.parts(shapes) for shapes in slots]
    arena, table, start = torch.zeros(sum(map(total_bytes, parts)), dtype=torch.uint8), [], 0
    for shapes, own in zip(slots, parts, strict=True):
        layout.pack([_random(shape, random) for shape in shapes], views(arena, own, start))
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
