"""BOFT: rotating every row's input and rescaling its output, one row for each adapter of a decoding batch.

The comparison is with an additional adapter: `work=lora` times rank-64 LoRA, ours and vLLM's, for as many
adapters on the same linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from benchmarks.kernels import lora
from benchmarks.kernels.harness import SHAPES, Case, Contender, Labels, Prepared, Shape, copies_for
from benchmarks.kernels.linears import DTYPE
from workers.kernels import boft
from workers.kernels.boft.reference import rotated
from workers.kernels.rows import Rows
from workers.kernels.types import Part, offsets, total_bytes, view

TOLERANCE = 8e-3
ADAPTERS = (2, 16, 96)
# (factors, block size) of adapters in turn
KINDS = {"m1b32": [(1, 32)], "m2b32": [(2, 32)], "mixed": [(1, 32), (2, 32), (2, 16), (1, 64), (3, 32)]}
TIMED = tuple(shape for shape in SHAPES if shape.name in ("7b-qkv", "7b-o", "qwen-gate-up"))
LORA_RANK = 64


def cases(shapes: Sequence[Shape] = TIMED) -> list[Case]:
    found = []
    for shape in shapes:
        urgent = shape == TIMED[0]
        for adapters in ADAPTERS:
            for kind, sizes in KINDS.items():
                labels: Labels = {"work": "rotate", "shape": shape.name, "adapters": adapters, "kind": kind}
                found.append(Case(labels, partial(_rotating, shape, adapters, sizes), urgent))
            labels = {"work": "rescale", "shape": shape.name, "adapters": adapters, "kind": "m1b32"}
            found.append(Case(labels, partial(_rescaling, shape, adapters), urgent))
            labels = {"work": "lora", "shape": shape.name, "adapters": adapters, "kind": "r64"}
            slots = np.arange(adapters, dtype=np.int32)
            found.append(Case(labels, partial(lora.prepared, shape, (LORA_RANK,) * adapters, slots), urgent))
    return found


@dataclass(frozen=True)
class Layer:
    """One copy of the arguments, as one layer of a model has them."""

    x: torch.Tensor
    into: torch.Tensor
    out: torch.Tensor
    table: torch.Tensor
    offsets: Sequence[dict[str, int]]


@dataclass(frozen=True)
class Setting:
    shape: Shape
    adapters: int
    parts: Sequence[tuple[Part, ...]]
    arena: torch.Tensor
    layers: Sequence[Layer]
    rows: Rows


def _setting(
    shape: Shape, adapters: int, sizes: Sequence[tuple[int, int]], moved: int, device: torch.device
) -> Setting:
    shapes = [
        [boft.Shape(shape.inputs, outputs, *sizes[i % len(sizes)]) for outputs in shape.slices]
        for i in range(adapters)
    ]
    parts = [boft.parts(of_adapter, DTYPE) for of_adapter in shapes]
    per_layer = sum(total_bytes(of_adapter) for of_adapter in parts)
    copies = copies_for(moved)
    arena = torch.zeros(copies * per_layer, dtype=torch.uint8, device=device)
    layers = []
    for copy in range(copies):
        start, described, placed = copy * per_layer, [], []
        for of_adapter, slices in zip(parts, shapes, strict=True):
            at = offsets(of_adapter, start)
            for part in of_adapter:
                view(arena, part, at[part.name]).normal_(0, 0.02)
            described.append(boft.describe(slices, at))
            placed.append(at)
            start += total_bytes(of_adapter)
        x = torch.randn(adapters, shape.inputs, device=device, dtype=DTYPE)
        into = torch.empty(len(shape.slices), *x.shape, device=device, dtype=DTYPE)
        out = torch.randn(adapters, shape.outputs, device=device, dtype=DTYPE)
        layers.append(Layer(x, into, out, torch.tensor(described, device=device), placed))
    rows = Rows(adapters, adapters, device)
    rows.update(np.arange(adapters, dtype=np.int32))
    return Setting(shape, adapters, parts, arena, layers, rows)


def _rotating(
    shape: Shape,
    adapters: int,
    sizes: Sequence[tuple[int, int]],
    device: torch.device,
) -> Prepared:
    weights = sum(m * b for m, b in (sizes[i % len(sizes)] for i in range(adapters)))
    slices = len(shape.slices)
    moved = DTYPE.itemsize * shape.inputs * (slices * weights + adapters * (1 + slices))
    at = _setting(shape, adapters, sizes, moved, device)
    most = max(factors for factors, _ in sizes)

    def launch(copy: int) -> None:
        layer = at.layers[copy]
        boft.rotate(layer.x, layer.into, at.arena, layer.table, at.rows, max_factors=most)

    return Prepared(
        copies=len(at.layers),
        bytes_moved=moved,
        flops=2 * slices * weights * shape.inputs,
        expected=lambda copy: _rotated(at, copy).flatten(0, 1),
        tolerance=TOLERANCE,
        contenders=[
            Contender(
                "ostinato",
                launch,
                lambda copy: at.layers[copy].into.flatten(0, 1),
                lambda copy: at.layers[copy].into.fill_(torch.nan),
            )
        ],
    )


def _rotated(at: Setting, copy: int) -> torch.Tensor:
    layer = at.layers[copy]
    found = torch.empty(layer.into.shape)
    for adapter, (parts, places) in enumerate(zip(at.parts, layer.offsets, strict=True)):
        for part in parts:
            if part.name.startswith("blocks"):
                blocks = view(at.arena, part, places[part.name]).cpu().transpose(-1, -2)
                i = int(part.name.removeprefix("blocks"))
                found[i, adapter] = rotated(layer.x[adapter : adapter + 1].cpu(), blocks)[0]
    return found.to(layer.x.device)


def _rescaling(shape: Shape, adapters: int, device: torch.device) -> Prepared:
    moved = adapters * shape.outputs * (2 * DTYPE.itemsize + 4)
    at = _setting(shape, adapters, KINDS["m1b32"], moved, device)
    before = [layer.out.clone() for layer in at.layers]

    def launch(copy: int) -> None:
        layer = at.layers[copy]
        boft.rescale(layer.out, None, at.arena, layer.table, at.rows, shape.slices)

    def expected(copy: int) -> torch.Tensor:
        scales = [
            torch.cat(
                [view(at.arena, part, places[part.name]) for part in parts if part.name.startswith("scale")]
            )
            for parts, places in zip(at.parts, at.layers[copy].offsets, strict=True)
        ]
        return before[copy].float() * torch.stack(scales)

    return Prepared(
        copies=len(at.layers),
        bytes_moved=moved,
        flops=0,
        expected=expected,
        tolerance=TOLERANCE,
        contenders=[
            Contender(
                "ostinato",
                launch,
                lambda copy: at.layers[copy].out,
                lambda copy: at.layers[copy].out.copy_(before[copy]),
            )
        ],
    )
