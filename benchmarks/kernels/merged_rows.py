"""Products with merged weights, the base's included: one launch against a loop over merged weights that lie
in memory, and against the base's product with the deltas' added, as batches with fewer rows have it.

`rows` of a case: the base's, then each variant's, one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from benchmarks.kernels import sparse_delta as sparse_benchmark
from benchmarks.kernels.harness import SHAPES, Case, Contender, Prepared, Shape, copies_for
from benchmarks.kernels.linears import DTYPE, Layer
from workers.kernels import sparse_delta
from workers.kernels.rows import BASE, Rows
from workers.kernels.sparse_delta import merged_rows, merging, row_tiles
from workers.kernels.types import total_bytes

TOLERANCE = 8e-3  # a weight and an output are rounded to bfloat16, each by at most 2^-9 of its value
BITS = 4
# Prefills of several variants and of one, one with 27 that decode, and the base's own.
COUNTS = {
    "8 x 256": (0, *[256] * 8),
    "2048": (0, 2048),
    "930": (0, 930),
    "930 and 27 x 1": (0, *[1] * 27, 930),
    "512": (0, 512),
    "4 x 128": (0, *[128] * 4),
    "8 x 128 in 2048": (1024, *[128] * 8),
    "base 2048": (2048,),
    "base 930": (930,),
}
TINY = {"256 and 3": (2, 3, 256), "base 4": (4,)}
Dense = list[torch.Tensor]  # of the base and each variant, [outputs, inputs]


def cases(shapes: Sequence[Shape] = SHAPES) -> list[Case]:
    counts = TINY if all(shape.name.startswith("tiny") for shape in shapes) else COUNTS
    return [
        Case(
            {"shape": shape.name, "bits": BITS, "rows": name},
            partial(_prepare, shape, rows),
            urgent=shape.name.startswith("7b"),
        )
        for shape in shapes
        for name, rows in counts.items()
    ]


def _prepare(shape: Shape, counts: Sequence[int], device: torch.device) -> Prepared:
    variants = max(1, len(counts) - 1)
    slots = np.repeat(np.arange(BASE, len(counts) - 1, dtype=np.int32), counts)
    runs = row_tiles.merged_runs(slots, range(variants))
    rows, others = (Rows(len(slots), variants, device) for _ in range(2))
    rows.update(slots)
    rest = slots.copy()
    for run in runs:
        rest[run.rows] = BASE
    others.update(rest)
    tiles = row_tiles.RowTiles(len(slots), device)
    tiles.update(runs, len(slots))
    squares = sparse_delta.in_squares(shape.inputs, shape.slices, DTYPE) or device.type == "cpu"
    deltas = [sparse_delta.Shape(outputs, shape.inputs, BITS, squares=squares) for outputs in shape.slices]
    parts = sparse_delta.parts(deltas)
    weight_bytes = shape.outputs * shape.inputs * DTYPE.itemsize
    activations = DTYPE.itemsize * len(slots) * (shape.inputs + shape.outputs)
    moved = weight_bytes + (len(counts) - 1) * total_bytes(parts) + activations
    copies = copies_for(moved)
    arena = torch.empty(copies * variants * total_bytes(parts), dtype=torch.uint8, device=device)
    layers = [
        sparse_benchmark.filled(shape, deltas, parts, arena, copy, len(slots), variants)
        for copy in range(copies)
    ]
    bases = [(0.02 * torch.randn(shape.outputs, shape.inputs, device=device)).to(DTYPE) for _ in layers]
    merged = [_merged(base, layer)[: len(counts)] for base, layer in zip(bases, layers, strict=True)]
    members = np.split(np.arange(len(slots)), np.cumsum(counts)[:-1])
    cuts = [slice(rows[0], rows[-1] + 1) if len(rows) else slice(0, 0) for rows in members]

    def ours(copy: int) -> None:
        at = layers[copy]
        of_layer = merging.Layer(bases[copy], arena, at.table, shape.slices)
        merged_rows.apply(at.x, at.out, None, of_layer, tiles.of(len(slots)))
        sparse_delta.apply(at.x, at.out, arena, at.table, others, shape.slices)

    def added(copy: int) -> None:
        at = layers[copy]
        torch.mm(at.x, bases[copy].t(), out=at.out)
        sparse_delta.apply(at.x, at.out, arena, at.table, rows, shape.slices)

    def loop(copy: int) -> None:
        at = layers[copy]
        for weight, cut in zip(merged[copy], cuts, strict=True):
            if cut.stop > cut.start:
                torch.mm(at.x[cut], weight.t(), out=at.out[cut])

    def expected(copy: int) -> torch.Tensor:
        x = layers[copy].x.float()
        return torch.cat([x[cut] @ weight.float().T for weight, cut in zip(merged[copy], cuts, strict=True)])

    def contender(name: str, launch: Callable[[int], None]) -> Contender:
        return Contender(
            name, launch, lambda copy: layers[copy].out, lambda copy: layers[copy].out.fill_(float("nan"))
        )

    return Prepared(
        copies=copies,
        bytes_moved=moved,
        flops=2 * len(slots) * shape.inputs * shape.outputs,
        expected=expected,
        tolerance=TOLERANCE,
        contenders=[
            contender("ostinato", ours),
            contender("base-and-deltas", added),
            contender("torch-loop", loop),
        ],
    )


def _merged(base: torch.Tensor, layer: Layer[torch.Tensor]) -> Dense:
    return [base, *((base.float() + delta.float()).to(DTYPE) for delta in layer.weights)]
