"""Singular-value deltas: our two launches against dense products, over shapes, batches and variants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

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
from workers.kernels import svd_delta
from workers.kernels.rows import Rows
from workers.kernels.svd_delta import layout
from workers.kernels.types import offsets, total_bytes, view

DTYPE = torch.bfloat16
TOLERANCE = 1e-2  # bfloat16 rounds t, t times scale and the output
ATTENTION, MLP = {8: 2, 3: 32, 2: 968}, {8: 2, 3: 32, 2: 1428}  # Delta-CoMe's schedules, at 1/16
CLOSER = ("7b-qkv", "qwen-gate-up")  # shapes on which more variants and every distribution are timed
WITH_PEERS = ("7b-o",)  # dense weights of every variant and copy must fit


def cases() -> list[Case]:
    found = []
    for shape in SHAPES:
        for batch in (*BATCHES, PREFILL):
            for variants in (1, 8, 32):
                for distribution in DISTRIBUTIONS:
                    usual = variants == 8 and distribution == "uniform"
                    if usual or (shape.name in CLOSER and batch == 32):
                        found.append(_case(shape, batch, variants, distribution))
    return found


def _case(shape: Shape, batch: int, variants: int, distribution: str) -> Case:
    labels = {"shape": shape.name, "batch": batch, "variants": variants, "distribution": distribution}
    slots = slots_for(distribution, batch, variants)
    return Case(labels, partial(_prepare, shape, variants, slots))


@dataclass(frozen=True)
class Layer:
    """One copy of the arguments, as one layer of a model has them."""

    x: torch.Tensor
    y: torch.Tensor
    out: torch.Tensor
    table: torch.Tensor
    starts: Sequence[int]


def _prepare(shape: Shape, variants: int, slots: Int32s, device: torch.device) -> Prepared:
    by_bits = ATTENTION if max(shape.inputs, *shape.slices) <= 4096 else MLP
    ranks = (by_bits,) * len(shape.slices)
    parts = layout.parts(shape.inputs, shape.slices, ranks)
    rows = Rows(len(slots), variants, device)
    rows.update(slots)
    used = len(set(slots.tolist()))
    moved = used * total_bytes(parts) + DTYPE.itemsize * len(slots) * (shape.inputs + 2 * shape.outputs)
    total_rank = sum(by_bits.values())
    copies = copies_for(moved)
    arena = torch.randint(0, 256, (copies * variants * total_bytes(parts),), dtype=torch.uint8, device=device)
    layers = [_layer(shape, ranks, parts, variants, len(slots), copy, device) for copy in range(copies)]
    for layer in layers:
        for start in layer.starts:
            _fill(arena, shape, ranks, parts, start)
    # As an engine has it, which knows no more than a bound of ranks.
    scratch = svd_delta.Scratch(len(slots), total_rank, device, len(shape.slices))

    def launch(copy: int) -> None:
        at = layers[copy]
        svd_delta.apply(at.x, at.out, arena, at.table, rows, shape.slices, scratch)

    def reset(copy: int) -> None:
        layers[copy].out.copy_(layers[copy].y)
        scratch.shrunk.fill_(float("nan"))

    def output(copy: int) -> torch.Tensor:
        return layers[copy].out

    def delta(copy: int, slot: int) -> torch.Tensor:
        return _dense(arena, shape, ranks, parts, layers[copy].starts[slot])

    contenders = [Contender("ostinato", launch, output, reset)]
    if shape.name in WITH_PEERS and len(slots) < PREFILL:
        contenders += _peers(layers, slots, delta, output, reset)
    return Prepared(
        copies=copies,
        bytes_moved=moved,
        flops=2 * len(slots) * total_rank * (len(shape.slices) * shape.inputs + shape.outputs),
        expected=lambda copy: _expected(layers[copy], slots, partial(delta, copy)),
        tolerance=TOLERANCE,
        contenders=contenders,
    )


def _layer(shape, ranks, parts, variants, num_rows, copy, device) -> Layer:
    size = total_bytes(parts)
    starts = [(copy * variants + slot) * size for slot in range(variants)]
    table = [layout.describe(ranks, offsets(parts, start)) for start in starts]
    x = torch.randn(num_rows, shape.inputs, device=device, dtype=DTYPE)
    y = torch.randn(num_rows, shape.outputs, device=device, dtype=DTYPE)
    return Layer(x, y, y.clone(), torch.tensor(table, device=device), starts)


def _stored(arena, shape, ranks, parts, start):
    """(slice, side, columns, its bytes) of each side of one variant's delta, V before U."""
    at = offsets(parts, start)
    by_name = {part.name: view(arena, part, at[part.name]) for part in parts}
    for index, outputs in enumerate(shape.slices):
        for side, columns in (("v", shape.inputs), ("u", outputs)):
            yield index, side, columns, by_name[f"{side}{index}"]


def _fill(arena, shape, ranks, parts, start) -> None:
    """Codes and zero points stay random bytes; scales such that the delta's output is of the size of one.
    Digits of one rank have the same scale times powers of four."""
    for index, side, columns, stored in _stored(arena, shape, ranks, parts, start):
        scales = layout.coded(stored, layout.num_digits(ranks[index]), columns).scales
        size = columns**-0.5 if side == "v" else sum(ranks[0].values()) ** -0.5
        first = 0
        for bits, count in layout.DIGITS.items():
            rank = ranks[index].get(bits, 0)
            values = torch.empty(len(scales), rank, 1, device=arena.device).uniform_(0.5, 1.5)
            digits = values * (3 * size / (1 << bits)) * 4.0 ** torch.arange(count, device=arena.device)
            scales[:, first : first + rank * count] = digits.flatten(1)
            first += rank * count


def _dense(arena, shape, ranks, parts, start) -> torch.Tensor:
    """float32 [K, N] of one variant."""
    result = torch.zeros(shape.inputs, shape.outputs, device=arena.device)
    firsts = [sum(shape.slices[:index]) for index in range(len(shape.slices))]
    v = None
    for index, side, columns, stored in _stored(arena, shape, ranks, parts, start):
        matrix = layout.read(ranks[index], columns, stored)
        if side == "v":
            v = matrix
        else:
            result[:, firsts[index] : firsts[index] + columns] += v.T @ matrix
    return result


def _expected(layer: Layer, slots: Int32s, delta) -> torch.Tensor:
    result = layer.y.float()
    for slot in sorted(set(slots.tolist())):
        index = torch.from_numpy(slots == slot).to(result.device)
        result[index] += layer.x[index].float() @ delta(slot)
    return result


def _peers(layers, slots: Int32s, delta, output, reset) -> list[Contender]:
    """Dense bfloat16 deltas: one `bmm` over padded groups of rows, and a loop over variants."""
    used = sorted(set(slots.tolist()))
    device = layers[0].x.device
    index = [torch.from_numpy((slots == slot).nonzero()[0]).to(device) for slot in used]
    most = max(map(len, index))
    padded = torch.stack([torch.cat([rows, rows[:1].expand(most - len(rows))]) for rows in index])
    real = torch.stack([torch.arange(most, device=device) < len(rows) for rows in index])
    into = padded[real]
    weights = [torch.stack([delta(copy, slot).to(DTYPE) for slot in used]) for copy in range(len(layers))]
    place = real.flatten().nonzero()[:, 0]

    def bmm(copy: int) -> None:
        layer = layers[copy]
        products = torch.bmm(layer.x[padded], weights[copy]).flatten(0, 1)
        layer.out.index_add_(0, into, products[place])

    def loop(copy: int) -> None:
        layer = layers[copy]
        for rows, weight in zip(index, weights[copy], strict=True):
            layer.out.index_add_(0, rows, layer.x[rows] @ weight)

    return [Contender("dense bmm", bmm, output, reset), Contender("dense loop", loop, output, reset)]
