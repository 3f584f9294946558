"""Sparse deltas beside what another engine's quantized weights of as many bytes take: Humming's indexed
product, one expert a variant, in 3 bits (a 4-bit sparse delta has as many an element) or 2.

Ours adds to an output, which it reads; Humming writes one. Not all that has as many bytes says as much: this
compares how fast bytes are read, not what is served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.kernels import linears, peers
from benchmarks.kernels import sparse_delta as sparse_benchmark
from benchmarks.kernels.harness import SHAPES, Case, Contender, Int32s, Prepared, Shape
from benchmarks.kernels.linears import indices
from workers.kernels import sparse_delta

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
    work = sparse_benchmark.work_of(shape, bits, VARIANTS, slots, device)
    layers = work.layers
    groups = indices(slots, VARIANTS, device)
    tunings: dict[str, Any] = {}
    others = [peers.humming_experts(layer.weights, BITS[bits], slots, tunings) for layer in layers]

    def ours(at: linears.Layer[torch.Tensor]) -> None:
        sparse_delta.apply(at.x, at.out, work.arena, at.table, work.rows, shape.slices)

    contenders = [linears.contender("ostinato", layers, ours)]
    if all(others):
        contenders.append(_humming(layers, [each for each in others if each is not None], groups, bits))
    return Prepared(
        copies=len(layers),
        bytes_moved=work.bytes_moved,
        flops=2 * len(slots) * shape.inputs * shape.outputs,
        expected=lambda copy: sparse_benchmark.expected(layers[copy], groups),
        tolerance=sparse_benchmark.TOLERANCE,
        contenders=contenders,
    )


def _humming(
    layers: Sequence[linears.Layer[torch.Tensor]],
    experts: Sequence[peers.Experts],
    groups: Sequence[torch.Tensor],
    bits: int,
) -> Contender:
    def own(copy: int) -> linears.Layer[torch.Tensor]:
        return replace(layers[copy], y=torch.zeros_like(layers[copy].y), weights=experts[copy].weights)

    return Contender(
        f"humming-int{BITS[bits]}",
        lambda copy: experts[copy].product(layers[copy].x, layers[copy].out),
        lambda copy: layers[copy].out,
        lambda copy: layers[copy].out.fill_(float("nan")),
        expected=lambda copy: sparse_benchmark.expected(own(copy), groups),
    )
