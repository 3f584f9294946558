"""Singular-value deltas: our two launches, Triton's where those are in CUDA, and dense products, over shapes,
batches and variants."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from benchmarks.kernels import linears
from benchmarks.kernels.harness import (
    BATCHES,
    DISTRIBUTIONS,
    PREFILL,
    SHAPES,
    Case,
    Contender,
    Int32s,
    Labels,
    Prepared,
    Shape,
    copies_for,
)
from benchmarks.kernels.linears import DTYPE, Layer, indices
from workers.kernels import svd_delta
from workers.kernels.rows import SMALL_BLOCK, Rows
from workers.kernels.svd_delta import layout, tensor_cores, tensor_cores_check
from workers.kernels.svd_delta.layout import Ranks
from workers.kernels.svd_delta.plan import Plan, plan
from workers.kernels.svd_delta.tensor_cores import Cut
from workers.kernels.types import Part, offsets, total_bytes, view

TOLERANCE = 1e-2  # bfloat16 rounds t, t times scale and the output
ATTENTION, MLP = {8: 2, 3: 32, 2: 968}, {8: 2, 3: 32, 2: 1428}  # Delta-CoMe's schedules, at 1/16
CLOSER = ("7b-qkv", "qwen-gate-up")  # shapes on which more variants and every distribution are timed
WITH_PEERS = ("7b-o",)  # dense weights of every variant and copy must fit


def cases(shapes: Sequence[Shape] = SHAPES) -> list[Case]:
    found = []
    for shape in shapes:
        for batch in (*BATCHES, PREFILL):
            for variants in (1, 8, 32):
                for distribution in DISTRIBUTIONS:
                    usual = variants == 8 and distribution == "uniform"
                    if usual or (shape.name in CLOSER and batch == 32):
                        found.append(_case(shape, batch, variants, distribution))
    return found


def _case(shape: Shape, batch: int, variants: int, distribution: str) -> Case:
    labels: Labels = {"shape": shape.name, "batch": batch, "variants": variants, "distribution": distribution}
    urgent = batch in (8, 32) and variants == 8 and distribution == "uniform"
    return linears.case(labels, partial(_prepare, shape, variants), variants, urgent)


def _prepare(
    shape: Shape,
    variants: int,
    slots: Int32s,
    device: torch.device,
) -> Prepared:
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
        for start in layer.weights:
            _fill(arena, shape, ranks, parts, start)
    # The form of an engine, which knows only a bound of ranks.
    scratch = svd_delta.Scratch(len(slots), total_rank, device, len(shape.slices))

    def ours(at: Layer[Starts]) -> None:
        svd_delta.apply(at.x, at.out, arena, at.table, rows, shape.slices, scratch)

    def planned(cut: Plan | Cut, at: Layer[Starts]) -> None:
        tiles = rows.tiles(len(slots))
        shrink, expand = launches(cut)
        shrink(at.x, arena, at.table, tiles, cut, scratch)
        expand(at.out, arena, at.table, tiles, shape.slices, cut, scratch)

    def delta(at: Layer[Starts], slot: int) -> torch.Tensor:
        return _dense(arena, shape, ranks, parts, at.weights[slot])

    contenders = [linears.contender("ostinato", layers, ours, [scratch.shrunk])]
    tiles = rows.tiles(len(slots))
    if isinstance(svd_delta.plan_for(tiles, layers[0].x, scratch), Cut):
        triton = partial(planned, plan(tiles.block))
        contenders.append(linears.contender("Triton", layers, triton, [scratch.shrunk]))
    elif tiles.block == SMALL_BLOCK and tensor_cores_check.chosen(DTYPE):
        cuda = partial(planned, tensor_cores.cut_for(len(slots), scratch.slice_places))
        contenders.append(linears.contender("in CUDA, not used", layers, cuda, [scratch.shrunk]))
    if shape.name in WITH_PEERS and len(slots) < PREFILL:
        contenders += _peers(layers, slots, delta)
    return Prepared(
        copies=copies,
        bytes_moved=moved,
        flops=2 * len(slots) * total_rank * (len(shape.slices) * shape.inputs + shape.outputs),
        expected=lambda copy: _expected(layers[copy], slots, delta),
        tolerance=TOLERANCE,
        contenders=contenders,
    )


def launches(cut: Plan | Cut) -> tuple[Callable[..., None], Callable[..., None]]:
    """Triton's, or those in CUDA."""
    if isinstance(cut, Cut):
        return tensor_cores.shrink, tensor_cores.expand
    from workers.kernels.svd_delta import kernel

    return kernel.shrink, kernel.expand


Starts = Sequence[int]  # of each variant in the arena
Delta = Callable[[Layer[Starts], int], torch.Tensor]  # of one variant, as dense weights


def _layer(
    shape: Shape,
    ranks: Sequence[Ranks],
    parts: Sequence[Part],
    variants: int,
    num_rows: int,
    copy: int,
    device: torch.device,
) -> Layer[Starts]:
    size = total_bytes(parts)
    starts = [(copy * variants + slot) * size for slot in range(variants)]
    table = [layout.describe(ranks, offsets(parts, start)) for start in starts]
    return linears.layer(shape, num_rows, table, starts, device)


def _stored(
    arena: torch.Tensor, shape: Shape, parts: Sequence[Part], start: int
) -> Iterator[tuple[int, str, int, torch.Tensor]]:
    """(slice, side, columns, its bytes) of each side of one variant's delta, V before U."""
    at = offsets(parts, start)
    by_name = {part.name: view(arena, part, at[part.name]) for part in parts}
    for index, outputs in enumerate(shape.slices):
        for side, columns in (("v", shape.inputs), ("u", outputs)):
            yield index, side, columns, by_name[f"{side}{index}"]


def _fill(
    arena: torch.Tensor, shape: Shape, ranks: Sequence[Ranks], parts: Sequence[Part], start: int
) -> None:
    """Codes and zero points stay random bytes; scales such that the delta's output is of the size of one.
    Digits of one rank have the same scale times powers of four."""
    for index, side, columns, stored in _stored(arena, shape, parts, start):
        packed = layout.coded(stored, layout.num_digits(ranks[index]), columns)
        scales = packed.scales
        for rest in packed.unused:
            rest.zero_()
        size = columns**-0.5 if side == "v" else sum(ranks[0].values()) ** -0.5
        first = 0
        for bits, count in layout.DIGITS.items():
            rank = ranks[index].get(bits, 0)
            values = torch.empty(len(scales), rank, 1, device=arena.device).uniform_(0.5, 1.5)
            digits = values * (3 * size / (1 << bits)) * 4.0 ** torch.arange(count, device=arena.device)
            scales[:, first : first + rank * count] = digits.flatten(1)
            first += rank * count


def _dense(
    arena: torch.Tensor, shape: Shape, ranks: Sequence[Ranks], parts: Sequence[Part], start: int
) -> torch.Tensor:
    """float32 [K, N] of one variant."""
    result = torch.zeros(shape.inputs, shape.outputs, device=arena.device)
    firsts = [sum(shape.slices[:index]) for index in range(len(shape.slices))]
    v = torch.empty(0)
    for index, side, columns, stored in _stored(arena, shape, parts, start):
        matrix = layout.read(ranks[index], columns, stored)
        if side == "v":
            v = matrix
        else:
            result[:, firsts[index] : firsts[index] + columns] += v.T @ matrix
    return result


def _expected(layer: Layer[Starts], slots: Int32s, delta: Delta) -> torch.Tensor:
    result = layer.y.float()
    for slot in sorted(set(slots.tolist())):
        index = torch.from_numpy(slots == slot).to(result.device)
        result[index] += layer.x[index].float() @ delta(layer, slot)
    return result


def _peers(layers: Sequence[Layer[Starts]], slots: Int32s, delta: Delta) -> list[Contender]:
    """Dense bfloat16 deltas: one `bmm` over padded groups of rows, and a loop over variants."""
    used = sorted(set(slots.tolist()))
    device = layers[0].x.device
    index = [found for found in indices(slots, max(used) + 1, device) if len(found)]
    most = max(map(len, index))
    padded = torch.stack([torch.cat([rows, rows[:1].expand(most - len(rows))]) for rows in index])
    real = torch.stack([torch.arange(most, device=device) < len(rows) for rows in index])
    into = padded[real]
    weights = {id(layer): torch.stack([delta(layer, slot).to(DTYPE) for slot in used]) for layer in layers}
    place = real.flatten().nonzero()[:, 0]

    def bmm(layer: Layer[Starts]) -> None:
        products = torch.bmm(layer.x[padded], weights[id(layer)]).flatten(0, 1)
        layer.out.index_add_(0, into, products[place])

    def loop(layer: Layer[Starts]) -> None:
        for rows, weight in zip(index, weights[id(layer)], strict=True):
            layer.out.index_add_(0, rows, layer.x[rows] @ weight)

    found = (("dense bmm", bmm), ("dense loop", loop))
    return [linears.contender(name, layers, launch) for name, launch in found]
