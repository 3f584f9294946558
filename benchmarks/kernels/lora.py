"""LoRA: our two launches against vLLM's, over shapes, batches, ranks and distributions of rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.kernels import linears, peers
from benchmarks.kernels.harness import (
    BATCHES,
    DISTRIBUTIONS,
    PREFILL,
    SHAPES,
    Case,
    Int32s,
    Labels,
    Prepared,
    Shape,
    copies_for,
)
from benchmarks.kernels.linears import DTYPE, Layer
from workers.kernels import lora
from workers.kernels.lora import layout
from workers.kernels.rows import Rows
from workers.kernels.types import Part, offsets, total_bytes, view

TOLERANCE = 8e-3  # bfloat16 rounds t and the output: each by at most 2^-9 of its value
ADAPTERS = {
    "8xr16": (16,) * 8,
    "32xr16": (16,) * 32,
    "32xmixed8-64": (8, 16, 32, 64) * 8,
    "32xr64": (64,) * 32,
}
CLOSER = ("7b-qkv", "qwen-gate-up")  # shapes on which every adapter set and distribution is timed


def cases(shapes: Sequence[Shape] = SHAPES) -> list[Case]:
    found = []
    for shape in shapes:
        for batch in (*BATCHES, PREFILL):
            for adapters in ADAPTERS:
                for distribution in DISTRIBUTIONS:
                    usual = adapters == "8xr16" and distribution == "uniform"
                    if usual or (shape.name in CLOSER and batch in {32, 128}):
                        found.append(_case(shape, batch, adapters, distribution))
    return found


def _case(shape: Shape, batch: int, adapters: str, distribution: str) -> Case:
    labels: Labels = {"shape": shape.name, "batch": batch, "adapters": adapters, "distribution": distribution}
    ranks = ADAPTERS[adapters]
    urgent = distribution == "uniform" and (adapters == "8xr16" or batch == 32)
    return linears.case(labels, partial(prepared, shape, ranks), len(ranks), urgent)


# For each slice, A [r, K] and B^T [r, N].
Factors = Sequence[tuple[torch.Tensor, torch.Tensor]]


def prepared(shape: Shape, ranks: Sequence[int], slots: Int32s, device: torch.device) -> Prepared:
    rows = Rows(len(slots), len(ranks), device)
    rows.update(slots)
    moved, flops = _cost(shape, ranks, slots)
    copies = copies_for(moved)
    stored = [layout.parts(shape.inputs, shape.slices, _each(shape, rank), DTYPE) for rank in ranks]
    per_layer = sum(total_bytes(parts) for parts in stored)
    arena = (torch.randn(copies * per_layer // 2, device=device, dtype=DTYPE) / 16).view(torch.uint8)
    layers = [_layer(shape, ranks, stored, len(slots), arena, copy * per_layer) for copy in range(copies)]
    scratch = lora.Scratch(len(slots), len(ranks), max(ranks) * len(shape.slices), device)

    def ours(at: Layer[list[Factors]]) -> None:
        lora.apply(at.x, at.out, arena, at.table, rows, shape.slices, scratch)

    contenders = [linears.contender("ostinato", layers, ours, (scratch.shrunk, scratch.pieces))]
    vllm = peers.vllm_lora(layers, slots, shape.slices, max(ranks))
    if vllm is not None:
        contenders.append(linears.contender("vllm", layers, vllm))
    return Prepared(
        copies=copies,
        bytes_moved=moved,
        flops=flops,
        expected=lambda copy: _expected(layers[copy], slots),
        tolerance=TOLERANCE,
        contenders=contenders,
    )


def _each(shape: Shape, rank: int) -> tuple[int, ...]:
    return (rank,) * len(shape.slices)


def _cost(shape: Shape, ranks: Sequence[int], slots: Int32s) -> tuple[int, int]:
    """Bytes and operations: used adapters once, inputs once, outputs read and written."""
    per_rank = len(shape.slices) * shape.inputs + shape.outputs
    adapters = sum(ranks[slot] for slot in set(slots.tolist())) * per_rank
    rows = len(slots) * (shape.inputs + 2 * shape.outputs)
    flops = 2 * sum(ranks[slot] for slot in slots.tolist()) * per_rank
    return DTYPE.itemsize * (adapters + rows), flops


def _layer(
    shape: Shape,
    ranks: Sequence[int],
    stored: Sequence[tuple[Part, ...]],
    num_rows: int,
    arena: torch.Tensor,
    start: int,
) -> Layer[list[Factors]]:
    described: list[tuple[int, ...]] = []
    weights: list[Factors] = []
    for rank, parts in zip(ranks, stored, strict=True):
        at = offsets(parts, start)
        described.append(layout.describe(_each(shape, rank), at))
        a, *expanding = (view(arena, part, at[part.name]) for part in parts)
        weights.append(list(zip(a.chunk(len(shape.slices)), expanding, strict=True)))
        start += total_bytes(parts)
    return linears.layer(shape, num_rows, described, weights, arena.device)


def _expected(layer: Layer[list[Factors]], slots: Int32s) -> torch.Tensor:
    result = layer.y.double()
    for slot in sorted(set(slots.tolist())):
        index = torch.from_numpy(slots == slot).to(result.device)
        x = layer.x[index].double()
        added = [x @ a.double().T @ b.double() for a, b in layer.weights[slot]]
        result[index] += torch.cat(added, dim=1)
    return result
