"""The sparse product in torch: the CPU's path, and the reference for tests of the GPU's kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import torch

from workers.kernels.rows import Rows
from workers.kernels.sparse_delta import squares
from workers.kernels.sparse_delta.layout import FIELDS, GROUP, IN_SQUARES, Shape, parts
from workers.kernels.types import view


def apply(
    x: torch.Tensor,  # [M, K]
    out: torch.Tensor,  # [M, sum(slices)]
    arena: torch.Tensor,
    table: torch.Tensor,
    rows: Rows,
    slices: Sequence[int],
) -> None:
    """DeltaZip's selective batched matrix product: out[rows of a slot] += x D^T for each of its slices."""
    for slot, members in rows.groups():
        inputs = x[members].float()  # [rows of this slot, K]
        deltas = _deltas(arena, table[slot], slices, x.shape[1])
        for columns, delta in zip(torch.split(out, list(slices), dim=1), deltas, strict=True):
            if delta is not None:
                sum = columns[members].float() + inputs @ delta.T
                columns[members] = sum.to(out.dtype)


def merged(
    base: torch.Tensor, arena: torch.Tensor, fields: torch.Tensor, slices: Sequence[int]
) -> torch.Tensor:
    """base + D [sum(slices), K], for the variant whose row of the layer's table is `fields`."""
    deltas = _deltas(arena, fields, slices, base.shape[1])
    parts = zip(torch.split(base, list(slices)), deltas, strict=True)
    return torch.cat([w if d is None else (w.float() + d).to(w.dtype) for w, d in parts])


def _deltas(
    arena: torch.Tensor, fields: torch.Tensor, slices: Sequence[int], inputs: int
) -> Iterator[torch.Tensor | None]:
    """Each slice's delta, dense."""
    for outputs, (kind, *offsets, scales) in zip(slices, fields.view(-1, FIELDS).tolist(), strict=True):
        in_squares, bits = divmod(kind, IN_SQUARES)
        if bits == 0:
            yield None
        else:
            yield unpack(arena, Shape(outputs, inputs, bits, scales, bool(in_squares)), offsets)


def unpack(arena: torch.Tensor, shape: Shape, offsets: Sequence[int]) -> torch.Tensor:
    """The dense delta, float32 [outputs, inputs]. `offsets`: of values (or squares), masks and scales in the
    arena.
    """
    if shape.squares:
        made, scales = (view(arena, part, at) for part, at in zip(parts([shape]), offsets[::2], strict=True))
        return squares.unpack(made, scales, shape.bits)
    at = dict(zip(("values0", "masks0", "scales0"), offsets, strict=True))
    stored = {part.name: view(arena, part, at[part.name]) for part in parts([shape])}
    index = stored["values0"].int()
    if shape.bits == 4:
        index += _per_row(stored["masks0"], shape).int() << 8
    codes = torch.nn.functional.embedding(
        index, _meanings(shape.bits).to(arena.device)
    )  # [outputs, groups, 4]
    by_scale = codes.view(shape.outputs, shape.scales, -1)
    return by_scale.mul_(stored["scales0"].T.float()[:, :, None]).view(shape.outputs, shape.inputs)


def _per_row(shared: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Each row's masks, uint8 [outputs, groups], from bytes that two rows share."""
    return torch.cat((shared & 15, shared >> 4))[: shape.outputs]


@cache
def _meanings(bits: int) -> torch.Tensor:
    """float32 [entries, 4]: a group's four values, by the bits that encode them."""
    if bits == 2:
        codes = torch.arange(256)[:, None] >> torch.tensor([0, 2, 4, 6])
        return ((codes & 3) - 2).float()
    mask, values = torch.arange(16 * 256) >> 8, torch.arange(16 * 256) & 255
    meanings = torch.zeros(16 * 256, GROUP)
    taken = torch.zeros_like(mask)  # how many values of the group earlier columns took
    for column in range(GROUP):
        kept = (mask >> column) & 1
        code = torch.where(taken == 0, values & 15, values >> 4)
        meanings[:, column] = torch.where(kept.bool(), code - 8, 0)
        taken += kept
    return meanings
