"""Singular-value deltas in torch: the CPU's path, and the reference for tests of the kernels.

Words are not dequantised: a table turns each word into its eight digits as floats, and products are of
digits. Scales and zero points, one per 128 columns, are applied to the products. The order of columns differs
(16 j + i is digit j of word i), so the batch's rows are reordered: they are fewer than the weights.
"""

from __future__ import annotations

import functools

import torch

from workers.kernels.rows import Rows
from workers.kernels.svd_delta import layout
from workers.kernels.svd_delta.layout import PANEL, PER_SLICE, PLANES, WORDS, Coded
from workers.kernels.types import Part, view


def apply(
    x: torch.Tensor,  # [T, K]
    out: torch.Tensor,  # [T, N]
    arena: torch.Tensor,
    table: torch.Tensor,
    rows: Rows,
    slices: tuple[int, ...],
) -> None:
    """Add each variant's (x V^T) U^T to its rows of `out`, slice by slice."""
    for slot, index in rows.groups():
        described = table[slot].view(-1, PER_SLICE).tolist()
        if not any(digits or halves for digits, *_, halves, _, _ in described):
            continue
        inputs = x[index].float()
        panels, start = _panels(inputs), 0
        for outputs, (digits, four, two, v_at, u_at, halves, *half_at) in zip(slices, described, strict=True):
            columns = out[:, start : start + outputs]
            start += outputs
            added = None
            if digits:
                t = _shrink(panels, _coded(arena, digits, x.shape[1], v_at))
                added = _expand(_joined(t, four, two), _coded(arena, digits, outputs, u_at))[:, :outputs]
            if halves:
                v = _half(arena, halves, x.shape[1], half_at[0])
                more = inputs @ v.T @ _half(arena, halves, outputs, half_at[1])
                added = more if added is None else added + more
            if added is not None:
                columns[index] = (columns[index] + added).to(out.dtype)


def _panels(inputs: torch.Tensor) -> torch.Tensor:
    """float32 [panels, n, PANEL]: the rows' columns in the order of digits."""
    padded = torch.nn.functional.pad(inputs, (0, -inputs.shape[1] % PANEL))
    by_plane = padded.view(len(inputs), -1, PLANES, WORDS)
    return by_plane.permute(1, 0, 3, 2).reshape(-1, len(inputs), PANEL)


def _shrink(panels: torch.Tensor, v: Coded) -> torch.Tensor:
    """float32 [n, D]: V x for every digit."""
    products = torch.bmm(panels, _digits(v.words).transpose(1, 2))  # [panels, n, D]
    products -= panels.sum(2, keepdim=True) * v.zero_points()[:, None, :]
    return (products * v.scales.float()[:, None, :]).sum(0)


def _joined(t: torch.Tensor, four: int, two: int) -> torch.Tensor:
    """Each digit's inner product, replaced by its rank's sum: the value by which each digit of U is
    multiplied.
    """
    if two == 0:
        return t
    return torch.cat(
        [
            t[:, :four].unflatten(1, (-1, 4)).sum(2).repeat_interleave(4, 1),
            t[:, four:two].unflatten(1, (-1, 2)).sum(2).repeat_interleave(2, 1),
            t[:, two:],
        ],
        1,
    )


def _expand(t: torch.Tensor, u: Coded) -> torch.Tensor:
    """float32 [n, panels of columns]: t U^T."""
    scaled = t * u.scales.float()[:, None, :]  # [panels, n, D]
    products = torch.bmm(scaled, _digits(u.words))
    products -= torch.bmm(scaled, u.zero_points()[:, :, None])
    by_word = products.view(-1, len(t), WORDS, PLANES)
    return by_word.permute(1, 0, 3, 2).reshape(len(t), -1)


def _digits(words: torch.Tensor) -> torch.Tensor:
    """float32 [panels, D, PANEL]: the eight digits of each word, next to one another."""
    digits = torch.nn.functional.embedding(words.int() & 0xFFFF, _table())
    return digits.flatten(2)


@functools.cache
def _table() -> torch.Tensor:
    """float32 [65536, 8]: 2 MiB, which a core's cache can hold."""
    words = torch.arange(1 << 16, dtype=torch.int32)[:, None]
    return (words >> 2 * torch.arange(PLANES, dtype=torch.int32) & 3).float()


def _coded(arena: torch.Tensor, digits: int, columns: int, offset: int) -> Coded:
    part = Part("", torch.uint8, (layout.coded_bytes(digits, columns),))
    return layout.coded(view(arena, part, offset), digits, columns)


def _half(arena: torch.Tensor, rank: int, columns: int, offset: int) -> torch.Tensor:
    return view(arena, Part("", torch.float16, (rank, columns)), offset).float()
