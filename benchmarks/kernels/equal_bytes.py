"""Sparse deltas beside what another engine's quantized weights of as many bytes take: Humming's indexed
product, one expert a variant, in 3 bits (a 4-bit sparse delta has as many an element) or 2.

Ours adds to an output, which it reads; Humming writes one. Not all that has as many bytes says as much: this
compares how fast bytes are read, not what is served.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.kernels import linears, peers
from benchmarks.kernels import sparse_delta as sparse_benchmark
from benchmarks.kernels.harness import SHAPES, Case, Contender, Int32s, Prepared, Shape, copies_for
from benchmarks.kernels.linears import DTYPE, indices
from workers.kernels import sparse_delta
from workers.kernels.rows import Rows
from workers.kernels.types import total_bytes

VARIANTS = 8
BITS = {4: 3, 2: 2}  # of a sparse delta's values, and of dense weights of as many bytes
ROWS = (8, 32, 128)
NAMES = ("7b-qkv", "7b-gate-up", "7b-down", "qwen-gate-up")


def cases(shapes: Sequence[Shape] = SHAPES) -> list[Case]:
    return [
        linears.case(
            {
                "shape": shape.name,
                "bits": bits,
                "batch": rows,
                "variants": VARIANTS,
                "distribution": "distinct",
            },
            partial(_prepare, shape, bits),
            VARIANTS,
        )
        for bits in BITS
        for shape in shapes
        if shape.name in NAMES or shape.name.startswith("tiny")
        for rows in ROWS
    ]


def _prepare(shape: Shape, bits: int, slots: Int32s, device: torch.device) -> Prepared:
    rows = Rows(len(slots), VARIANTS, device)
    rows.update(slots)
    squares = sparse_delta.in_squares(shape.inputs, shape.slices, DTYPE)
    deltas = [sparse_delta.Shape(outputs, shape.inputs, bits, squares=squares) for outputs in shape.slices]
    parts = sparse_delta.parts(deltas)
    activations = DTYPE.itemsize * len(slots) * (shape.inputs + 2 * shape.outputs)
    moved = VARIANTS * sum(part.size_bytes for part in parts) + activations
    copies = copies_for(moved)
    arena = torch.empty(copies * VARIANTS * total_bytes(parts), dtype=torch.uint8, device=device)
    layers, others = [], []
    groups = indices(slots, VARIANTS, device)
    tunings: dict[str, Any] = {}
    for copy in range(copies):
        layers.append(sparse_benchmark.filled(shape, deltas, parts, arena, copy, len(slots), VARIANTS))
        others.append(peers.humming_experts(layers[-1].weights, BITS[bits], slots, tunings))

    def ours(at: linears.Layer[torch.Tensor]) -> None:
        sparse_delta.apply(at.x, at.out, arena, at.table, rows, shape.slices)

    contenders = [linears.contender("ostinato", layers, ours)]
    if all(others):
        contenders.append(_humming(layers, [each for each in others if each is not None], groups, bits))
    return Prepared(
        copies=copies,
        bytes_moved=moved,
        flops=2 * len(slots) * shape.inputs * shape.outputs,
        expected=lambda copy: _product(layers[copy].x, layers[copy].weights, groups, layers[copy].y),
        tolerance=sparse_benchmark.TOLERANCE,
        contenders=contenders,
    )


def _humming(
    layers: Sequence[linears.Layer[torch.Tensor]],
    experts: Sequence[peers.Experts],
    groups: Sequence[torch.Tensor],
    bits: int,
) -> Contender:
    return Contender(
        f"humming-int{BITS[bits]}",
        lambda copy: experts[copy].product(layers[copy].x, layers[copy].out),
        lambda copy: layers[copy].out,
        lambda copy: layers[copy].out.fill_(float("nan")),
        expected=lambda copy: _product(
            layers[copy].x, experts[copy].weights, groups, torch.zeros_like(layers[copy].y)
        ),
    )


def _product(
    x: torch.Tensor, weights: torch.Tensor, groups: Sequence[torch.Tensor], y: torch.Tensor
) -> torch.Tensor:
    result = y.float()
    for members, of_variant in zip(groups, weights, strict=True):
        if len(members):
            result[members] += x[members].float() @ of_variant.float().T
    return result
