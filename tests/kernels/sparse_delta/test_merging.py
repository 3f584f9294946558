"""Merged weights, where torch merges in the place of the GPU's kernel; the reference are dense deltas."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from testkit.kernels.deltas import dense, load, random_delta
from workers.kernels.sparse_delta import Delta, Shape, merging

SLICES, INPUTS = (64, 192, 128), 128


def slots(random: np.random.Generator) -> list[list[Delta | None]]:
    """4 bits, 2 bits, and one without deltas in the first slice."""
    made: list[list[Delta | None]]
    made = [[random_delta(Shape(w, INPUTS, bits), random) for w in SLICES] for bits in (4, 2)]
    return [*made, [None, *made[0][1:]]]


def merged(base: torch.Tensor, deltas: Sequence[Delta | None]) -> torch.Tensor:
    parts = torch.split(base.double(), list(SLICES))
    return torch.cat([w if d is None else w + dense(d) for w, d in zip(parts, deltas, strict=True)])


@pytest.mark.parametrize(("slot", "first"), [(0, 0), (1, 64), (2, 256)])
def test_weights_are_merged_from_any_strip_on(slot: int, first: int) -> None:
    made = slots(np.random.default_rng(slot))
    arena, table = load(made, squares=True)
    base = torch.randn(sum(SLICES), INPUTS).bfloat16()
    into = torch.empty(128, INPUTS, dtype=torch.bfloat16)
    merging.merge(into, merging.Layer(base, arena, table, SLICES), slot, first)
    assert torch.equal(into, merged(base, made[slot])[first : first + 128].bfloat16())
