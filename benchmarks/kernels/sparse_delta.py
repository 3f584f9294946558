"""Sparse deltas: one launch against a loop over the deltas and against a batched product, both of torch and
on weights that were made dense beforehand (16 bits an element instead of 3 or 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from benchmarks.kernels.harness import (
    BATCHES,
    DISTRIBUTIONS,
    PREFILL,
    SHAPES,
    Case,
    Contender,
    Int32s,
    Prepared,
    Shape,
    copies_for,
    slots_for,
)
from workers.kernels import sparse_delta
from workers.kernels.rows import Rows
from workers.kernels.sparse_delta.reference import unpack
from workers.kernels.types import Part, offsets, total_bytes, view

DTYPE = torch.bfloat16
TOLERANCE = 8e-3  # bfloat16 rounds the output, and the peers' weights, each by at most 2^-9 of its value
VARIANTS = (1, 2, 4, 8, 16, 32)
CLOSER = ("7b-gate-up", "qwen-gate-up")  # shapes on which every number of variants and distribution is timed
TWO_OF_FOUR = (0b0011, 0b0101, 0b1001, 0b0110, 0b1010, 0b1100)


def cases() -> list[Case]:
    found = []
    for shape in SHAPES:
        for bits in (4, 2):
            for batch in (*BATCHES, PREFILL):
                for variants in VARIANTS:
                    for distribution in DISTRIBUTIONS:
                        usual = variants == 8 and distribution == "distinct"
                        if usual or (shape.name in CLOSER and batch == 32):
                            found.append(_case(shape, bits, batch, variants, distribution))
    return found


def _case(shape: Shape, bits: int, batch: int, variants: int, distribution: str) -> Case:
    labels = {
        "shape": shape.name,
        "bits": bits,
        "batch": batch,
        "variants": variants,
        "distribution": distribution,
    }
    return Case(labels, partial(_prepare, shape, bits, slots_for(distribution, batch, variants), variants))


@dataclass(frozen=True)
class Layer:
    """One copy of the arguments, as one layer of a model has them. `dense`: [variants, outputs, inputs]."""

    x: torch.Tensor
    y: torch.Tensor
    out: torch.Tensor
    table: torch.Tensor
    dense: torch.Tensor


def _prepare(shape: Shape, bits: int, slots: Int32s, variants: int, device: torch.device) -> Prepared:
    rows = Rows(len(slots), variants, device)
    rows.update(slots)
    deltas = [sparse_delta.Shape(outputs, shape.inputs, bits) for outputs in shape.slices]
    parts = sparse_delta.parts(deltas)
    used = len(set(slots.tolist()))
    activations = DTYPE.itemsize * len(slots) * (shape.inputs + 2 * shape.outputs)
    moved = used * sum(part.size_bytes for part in parts) + activations
    copies = copies_for(moved)
    arena = torch.empty(copies * variants * total_bytes(parts), dtype=torch.uint8, device=device)
    layers = [_layer(shape, deltas, parts, arena, copy, len(slots), variants) for copy in range(copies)]
    groups = [torch.from_numpy(np.flatnonzero(slots == slot)).to(device) for slot in range(variants)]

    def ours(copy: int) -> None:
        at = layers[copy]
        sparse_delta.apply(at.x, at.out, arena, at.table, rows, shape.slices)

    def reset(copy: int) -> None:
        layers[copy].out.copy_(layers[copy].y)

    def output(copy: int) -> torch.Tensor:
        return layers[copy].out

    def loop(copy: int) -> None:
        at = layers[copy]
        for members, weights in zip(groups, at.dense, strict=True):
            if len(members):
                at.out.index_add_(0, members, at.x[members] @ weights.T)

    return Prepared(
        copies=copies,
        bytes_moved=moved,
        flops=2 * len(slots) * shape.inputs * shape.outputs,
        expected=lambda copy: _expected(layers[copy], groups),
        tolerance=TOLERANCE,
        contenders=[
            Contender("ostinato", ours, output, reset),
            Contender("torch-loop", loop, output, reset),
            Contender("torch-bmm", _batched(layers, groups), output, reset),
        ],
    )


def _batched(layers: Sequence[Layer], groups: Sequence[torch.Tensor]):
    """One product for all variants, each padded to the rows of the one that has most."""
    most = max(len(members) for members in groups)
    padded = torch.zeros(len(groups), most, dtype=torch.int64, device=layers[0].x.device)
    for slot, members in enumerate(groups):
        padded[slot, : len(members)] = members
    real = torch.cat([slot * most + torch.arange(len(members)) for slot, members in enumerate(groups)])
    real = real.to(padded.device)
    rows = torch.cat(list(groups))

    def launch(copy: int) -> None:
        at = layers[copy]
        product = torch.bmm(at.x[padded], at.dense.transpose(1, 2))  # [variants, most, outputs]
        at.out.index_add_(0, rows, product.flatten(0, 1)[real])

    return launch


def _layer(
    shape: Shape,
    deltas: Sequence[sparse_delta.Shape],
    parts: Sequence[Part],
    arena: torch.Tensor,
    copy: int,
    num_rows: int,
    variants: int,
) -> Layer:
    device = arena.device
    described, dense = [], []
    for variant in range(variants):
        at = offsets(parts, (copy * variants + variant) * total_bytes(parts))
        for part in parts:
            _fill(view(arena, part, at[part.name]), part.name)
        described.append(sparse_delta.describe(deltas, at))
        where = [(at[f"values{i}"], at.get(f"masks{i}", 0), at[f"scales{i}"]) for i in range(len(deltas))]
        dense.append(
            torch.cat(
                [unpack(arena, delta, place).to(DTYPE) for delta, place in zip(deltas, where, strict=True)]
            )
        )
    x = torch.randn(num_rows, shape.inputs, device=device, dtype=DTYPE)
    y = torch.randn(num_rows, shape.outputs, device=device, dtype=DTYPE)
    return Layer(x, y, y.clone(), torch.tensor(described, device=device), torch.stack(dense))


def _fill(memory: torch.Tensor, name: str) -> None:
    if name.startswith("scales"):
        memory.uniform_(0.001, 0.01)
    elif name.startswith("masks"):
        kept = torch.tensor(TWO_OF_FOUR, dtype=torch.uint8, device=memory.device)
        low, high = (kept[torch.randint(0, 6, memory.shape, device=memory.device)] for _ in range(2))
        memory.copy_(low | high << 4)
    else:
        memory.random_(0, 256)


def _expected(layer: Layer, groups: Sequence[torch.Tensor]) -> torch.Tensor:
    """In float32: the weights' own rounding to 16 bits is the peers', and within the tolerance."""
    result = layer.y.float()
    for members, weights in zip(groups, layer.dense, strict=True):
        if len(members):
            result[members] += layer.x[members].float() @ weights.float().T
    return result
