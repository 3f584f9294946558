"""A product with merged weights, where torch merges in the place of the GPU's kernel; the reference are dense
deltas."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels.sparse_delta.deltas import dense, load, random_delta

from workers.kernels.sparse_delta import Delta, Shape, merging

SLICES, INPUTS = (64, 192, 128), 128
ROW_BYTES = 4 * INPUTS


def slots(random: np.random.Generator) -> list[list[Delta | None]]:
    """4 bits, 2 bits, and one without deltas in the first slice."""
    made: list[list[Delta | None]]
    made = [[random_delta(Shape(w, INPUTS, bits), random) for w in SLICES] for bits in (4, 2)]
    return [*made, [None, *made[0][1:]]]


def merged(base: torch.Tensor, deltas: Sequence[Delta | None]) -> torch.Tensor:
    parts = torch.split(base.double(), list(SLICES))
    return torch.cat([w if d is None else w + dense(d) for w, d in zip(parts, deltas, strict=True)])


@given(st.integers(0, 2), st.integers(1, 7), st.integers(0, 2**16), st.booleans())
def test_it_is_that_of_the_merged_model(slot: int, strips: int, seed: int, biased: bool) -> None:
    """However much of the weight is merged at a time."""
    made = slots(np.random.default_rng(seed))
    arena, table = load(made, squares=True)
    base, bias = torch.randn(sum(SLICES), INPUTS), torch.randn(sum(SLICES)) if biased else None
    x, out = torch.randn(5, INPUTS), torch.full((5, sum(SLICES)), torch.nan)
    scratch = merging.Scratch(torch.device("cpu"), 64 * strips * ROW_BYTES + 100)
    merging.product(x, out, bias, merging.Weights(base, arena, table[slot], SLICES), scratch)
    want = x.double() @ merged(base, made[slot]).T
    want = want if bias is None else want + bias
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4)


def test_it_may_write_into_rows_of_a_wider_output() -> None:
    made = slots(np.random.default_rng(0))
    arena, table = load(made, squares=True)
    base, x = torch.randn(sum(SLICES), INPUTS), torch.randn(3, INPUTS)
    whole = torch.zeros(5, sum(SLICES) + 8)
    scratch = merging.Scratch(torch.device("cpu"), 64 * ROW_BYTES)
    weights = merging.Weights(base, arena, table[1], SLICES)
    merging.product(x, whole[1:4, 8:], None, weights, scratch)
    want = x.double() @ merged(base, made[1]).T
    torch.testing.assert_close(whole[1:4, 8:].double(), want, rtol=1e-4, atol=1e-4)
    whole[1:4, 8:] = 0
    assert not whole.any()


@pytest.mark.parametrize(("slot", "first"), [(0, 0), (1, 64), (2, 256)])
def test_weights_are_merged_from_any_strip_on(slot: int, first: int) -> None:
    made = slots(np.random.default_rng(slot))
    arena, table = load(made, squares=True)
    base = torch.randn(sum(SLICES), INPUTS).bfloat16()
    into = torch.empty(128, INPUTS, dtype=torch.bfloat16)
    merging.merge(into, merging.Weights(base, arena, table[slot], SLICES), first)
    assert torch.equal(into, merged(base, made[slot])[first : first + 128].bfloat16())


def test_a_step_beside_which_the_gpu_is_busy_leaves_its_graph_sooner() -> None:
    """And one of smaller weights later: the host takes as long for each of them."""
    measured = merging.MEASURED_BYTES
    busy, alone = merging.ungraphed_from(merging.BUSY, measured), merging.ungraphed_from(1, measured)
    assert merging.MERGED_FROM <= busy < alone == merging.ungraphed_from(merging.BUSY - 1, measured)
    assert merging.ungraphed_from(1, measured / 4) == 4 * alone
    assert merging.ungraphed_from(1, measured * 1000) == merging.MERGED_FROM
