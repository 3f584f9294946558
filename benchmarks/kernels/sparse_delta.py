"""Sparse deltas: one launch against a loop over the deltas and against a batched product, both of torch and
on weights that were made dense beforehand (16 bits an element instead of 3 or 2).

With OSTINATO_SPARSE_TENSOR_CORES=1 ours is the product on sparse tensor cores, where a shape can have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.kernels import linears
from benchmarks.kernels.harness import (
    BATCHES,
    DISTRIBUTIONS,
    MIXED,
    MIXED_ROWS,
    MIXED_VARIANTS,
    PREFILL,
    SHAPES,
    Case,
    Int32s,
    Labels,
    Prepared,
    Shape,
    copies_for,
)
from benchmarks.kernels.linears import DTYPE, Layer, indices
from workers.kernels import sparse_delta
from workers.kernels.rows import Rows
from workers.kernels.sparse_delta import FIELDS
from workers.kernels.sparse_delta.reference import unpack
from workers.kernels.sparse_delta.squares import INDICES_BYTES
from workers.kernels.sparse_delta.tensor_cores_check import SORTED_PAIRS
from workers.kernels.types import Part, offsets, total_bytes, view

TOLERANCE = 8e-3  # bfloat16 rounds the output, and the peers' weights, each by at most 2^-9 of its value
VARIANTS = (1, 2, 4, 8, 16, 32)
CLOSER = ("7b-gate-up", "qwen-gate-up")  # shapes on which every number of variants and distribution is timed
TWO_OF_FOUR = (0b0011, 0b0101, 0b1001, 0b0110, 0b1010, 0b1100)


def cases(shapes: Sequence[Shape] = SHAPES) -> list[Case]:
    found = []
    for shape in shapes:
        for bits in (4, 2):
            for batch in (*BATCHES, PREFILL):
                for variants in VARIANTS:
                    for distribution in DISTRIBUTIONS:
                        usual = variants == 8 and distribution == "distinct"
                        if usual or (shape.name in CLOSER and batch == 32):
                            found.append(_case(shape, bits, batch, variants, distribution))
            found.append(_case(shape, bits, MIXED_ROWS, MIXED_VARIANTS, MIXED))
    return found


def _case(shape: Shape, bits: int, batch: int, variants: int, distribution: str) -> Case:
    labels: Labels = {
        "shape": shape.name,
        "bits": bits,
        "batch": batch,
        "variants": variants,
        "distribution": distribution,
    }
    urgent = batch in (8, 32) and variants == 8 and distribution == "distinct"
    return linears.case(labels, partial(_prepare, shape, bits, variants), variants, urgent)


Dense = torch.Tensor  # [variants, outputs, inputs]


@dataclass(frozen=True)
class Work:
    """Random deltas of one shape, as many copies as leave the cache cold, and what one launch moves."""

    rows: Rows
    arena: torch.Tensor
    layers: list[Layer[Dense]]
    bytes_moved: int


def work_of(shape: Shape, bits: int, variants: int, slots: Int32s, device: torch.device) -> Work:
    rows = Rows(len(slots), variants, device)
    rows.update(slots)
    squares = sparse_delta.in_squares(shape.inputs, shape.slices, DTYPE)
    deltas = [sparse_delta.Shape(outputs, shape.inputs, bits, squares=squares) for outputs in shape.slices]
    parts = sparse_delta.parts(deltas)
    used = len(set(slots.tolist()))
    activations = DTYPE.itemsize * len(slots) * (shape.inputs + 2 * shape.outputs)
    moved = used * sum(part.size_bytes for part in parts) + activations
    copies = copies_for(moved)
    arena = torch.empty(copies * variants * total_bytes(parts), dtype=torch.uint8, device=device)
    layers = [filled(shape, deltas, parts, arena, copy, len(slots), variants) for copy in range(copies)]
    return Work(rows, arena, layers, moved)


def _prepare(
    shape: Shape,
    bits: int,
    variants: int,
    slots: Int32s,
    device: torch.device,
) -> Prepared:
    work = work_of(shape, bits, variants, slots, device)
    rows, arena, layers = work.rows, work.arena, work.layers
    groups = indices(slots, variants, device)

    def ours(at: Layer[Dense]) -> None:
        sparse_delta.apply(at.x, at.out, arena, at.table, rows, shape.slices)

    def loop(at: Layer[Dense]) -> None:
        for members, weights in zip(groups, at.weights, strict=True):
            if len(members):
                at.out.index_add_(0, members, at.x[members] @ weights.T)

    launches = (("ostinato", ours), ("torch-loop", loop), ("torch-bmm", _batched(groups)))
    return Prepared(
        copies=len(layers),
        bytes_moved=work.bytes_moved,
        flops=2 * len(slots) * shape.inputs * shape.outputs,
        expected=lambda copy: expected(layers[copy], groups),
        tolerance=TOLERANCE,
        contenders=[linears.contender(name, layers, launch) for name, launch in launches],
    )


def _batched(groups: Sequence[torch.Tensor]) -> Callable[[Layer[Dense]], None]:
    """One product for all variants, each padded to the rows of the one that has most."""
    most = max(len(members) for members in groups)
    padded = torch.zeros(len(groups), most, dtype=torch.int64, device=groups[0].device)
    for slot, members in enumerate(groups):
        padded[slot, : len(members)] = members
    real = torch.cat([slot * most + torch.arange(len(members)) for slot, members in enumerate(groups)])
    real = real.to(padded.device)
    rows = torch.cat(list(groups))

    def launch(at: Layer[Dense]) -> None:
        product = torch.bmm(at.x[padded], at.weights.transpose(1, 2))  # [variants, most, outputs]
        at.out.index_add_(0, rows, product.flatten(0, 1)[real])

    return launch


def filled(
    shape: Shape,
    deltas: Sequence[sparse_delta.Shape],
    parts: Sequence[Part],
    arena: torch.Tensor,
    copy: int,
    num_rows: int,
    variants: int,
) -> Layer[Dense]:
    """A copy of the arguments, with random deltas in the arena."""
    described, dense = [], []
    for variant in range(variants):
        at = offsets(parts, (copy * variants + variant) * total_bytes(parts))
        for part in parts:
            _fill(view(arena, part, at[part.name]), part.name)
        row = sparse_delta.describe(deltas, at)
        described.append(row)
        where = [row[i + 1 : i + 4] for i in range(0, len(row), FIELDS)]
        dense.append(
            torch.cat(
                [unpack(arena, delta, place).to(DTYPE) for delta, place in zip(deltas, where, strict=True)]
            )
        )
    return linears.layer(shape, num_rows, described, torch.stack(dense), arena.device)


def _fill(memory: torch.Tensor, name: str) -> None:
    if name.startswith("scales"):
        memory.uniform_(0.001, 0.01)
    elif name.startswith("masks"):
        memory.copy_(_halves_of(TWO_OF_FOUR, memory))
    else:
        memory.random_(0, 256)
        if name.startswith("squares"):
            indices = memory[..., -INDICES_BYTES:]
            indices.copy_(_halves_of(SORTED_PAIRS, indices))


def _halves_of(choices: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Bytes of which each half is one of `choices`."""
    each = torch.tensor(choices, dtype=torch.uint8, device=like.device)
    low, high = (each[torch.randint(0, len(each), like.shape, device=like.device)] for _ in range(2))
    return low | high << 4


def expected(layer: Layer[Dense], groups: Sequence[torch.Tensor]) -> torch.Tensor:
    """In float32: the weights' own rounding to 16 bits is the peers', and within the tolerance."""
    result = layer.y.float()
    for members, weights in zip(groups, layer.weights, strict=True):
        if len(members):
            result[members] += layer.x[members].float() @ weights.float().T
    return result
