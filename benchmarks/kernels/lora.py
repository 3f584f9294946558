"""LoRA: our two launches against vLLM's, over shapes, batches, ranks and distributions of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.kernels import peers
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
from workers.kernels import lora
from workers.kernels.lora import layout
from workers.kernels.rows import Rows
from workers.kernels.types import Part, offsets, total_bytes, view

DTYPE = torch.bfloat16
TOLERANCE = 8e-3  # bfloat16 rounds t and the output: each by at most 2^-9 of its value
ADAPTERS = {
    "8xr16": (16,) * 8,
    "32xr16": (16,) * 32,
    "32xmixed8-64": (8, 16, 32, 64) * 8,
    "32xr64": (64,) * 32,
}
CLOSER = ("7b-qkv", "qwen-gate-up")  # shapes on which every adapter set and distribution is timed


def cases() -> list[Case]:
    found = []
    for shape in SHAPES:
        for batch in (*BATCHES, PREFILL):
            for adapters in ADAPTERS:
                for distribution in DISTRIBUTIONS:
                    usual = adapters == "8xr16" and distribution == "uniform"
                    if usual or (shape.name in CLOSER and batch in {32, 128}):
                        found.append(_case(shape, batch, adapters, distribution))
    return found


def _case(shape: Shape, batch: int, adapters: str, distribution: str) -> Case:
    labels = {"shape": shape.name, "batch": batch, "adapters": adapters, "distribution": distribution}
    slots = slots_for(distribution, batch, len(ADAPTERS[adapters]))
    return Case(labels, partial(_prepare, shape, ADAPTERS[adapters], slots))


@dataclass(frozen=True)
class Layer:
    """One copy of the arguments, as one layer of a model has them."""

    x: torch.Tensor
    y: torch.Tensor
    out: torch.Tensor
    table: torch.Tensor
    parts: Sequence[tuple[Sequence[Part], int]]


def _prepare(shape: Shape, ranks: Sequence[int], slots: Int32s, device: torch.device) -> Prepared:
    rows = Rows(len(slots), len(ranks), device)
    rows.update(slots)
    moved, flops = _cost(shape, ranks, slots)
    copies = copies_for(moved)
    stored = [layout.parts(shape.inputs, shape.slices, _each(shape, rank), DTYPE) for rank in ranks]
    per_layer = sum(total_bytes(parts) for parts in stored)
    arena = (torch.randn(copies * per_layer // 2, device=device, dtype=DTYPE) / 16).view(torch.uint8)
    layers = [_layer(shape, ranks, stored, len(slots), copy * per_layer, device) for copy in range(copies)]
    scratch = lora.Scratch(len(slots), len(ranks), max(ranks) * len(shape.slices), device)

    def launch(copy: int) -> None:
        at = layers[copy]
        lora.apply(at.x, at.out, arena, at.table, rows, shape.slices, scratch)

    def reset(copy: int) -> None:
        layers[copy].out.copy_(layers[copy].y)
        scratch.shrunk.fill_(float("nan"))
        scratch.pieces.fill_(float("nan"))

    def output(copy: int) -> torch.Tensor:
        return layers[copy].out

    ours = Contender("ostinato", launch, output, reset)
    weights = [[_factors(arena, shape, parts, start) for parts, start in at.parts] for at in layers]
    calls = [(at.x, at.out) for at in layers]
    vllm = peers.vllm_lora(calls, weights, slots, shape.slices, max(ranks))
    theirs = [] if vllm is None else [Contender("vllm", vllm, output, reset)]
    return Prepared(
        copies=copies,
        bytes_moved=moved,
        flops=flops,
        expected=lambda copy: _expected(layers[copy], weights[copy], slots, shape),
        tolerance=TOLERANCE,
        contenders=[ours, *theirs],
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
    start: int,
    device: torch.device,
) -> Layer:
    described, placed = [], []
    for rank, parts in zip(ranks, stored, strict=True):
        described.append(layout.describe(_each(shape, rank), offsets(parts, start)))
        placed.append((parts, start))
        start += total_bytes(parts)
    x = torch.randn(num_rows, shape.inputs, device=device, dtype=DTYPE)
    y = torch.randn(num_rows, shape.outputs, device=device, dtype=DTYPE)
    return Layer(x, y, y.clone(), torch.tensor(described, device=device), placed)


def _factors(
    arena: torch.Tensor, shape: Shape, parts: Sequence[Part], start: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A [r, K] and B^T [r, N] of each slice."""
    at = offsets(parts, start)
    a, *expanding = (view(arena, part, at[part.name]) for part in parts)
    return list(zip(a.chunk(len(shape.slices)), expanding, strict=True))


def _expected(
    layer: Layer,
    weights: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]],
    slots: Int32s,
    shape: Shape,
) -> torch.Tensor:
    result = layer.y.double()
    for slot in sorted(set(slots.tolist())):
        index = torch.from_numpy(slots == slot).to(result.device)
        x = layer.x[index].double()
        added = [x @ a.double().T @ b.double() for a, b in weights[slot]]
        result[index] += torch.cat(added, dim=1)
    return result
