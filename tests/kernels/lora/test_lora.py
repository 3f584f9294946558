"""LoRA: layout, reference and Triton kernels (interpreted) against dense products in float64."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from testkit.kernels.batches import (
    CPU,
    Run,
    check_alone_as_among,
    check_dense,
    poisoned,
    rows_of,
    some_slots,
    with_large_tiles,
)
from workers.kernels import lora
from workers.kernels.lora import layout
from workers.kernels.lora.layout import Factors
from workers.kernels.lora.plan import plan
from workers.kernels.rows import BASE, Rows
from workers.kernels.types import offsets, total_bytes, views

FLOAT32_ERROR = 1e-5
BFLOAT16_ERROR = 2e-2  # t and the output are rounded to 8 bits each, of sums of magnitude 1 to 4


@dataclass
class Model:
    """One linear with its adapters, packed."""

    inputs: int
    slices: tuple[int, ...]
    adapters: list[list[Factors | None]]
    arena: torch.Tensor
    table: torch.Tensor

    def dense(self, x: torch.Tensor, y: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
        """The expected result, in float64."""
        result = y.double()
        for row, slot in enumerate(slots):
            start = 0
            for factors, outputs in zip(
                self.adapters[slot] if slot != BASE else [], self.slices, strict=False
            ):
                if factors is not None:
                    added = (x[row].double() @ factors.a.double().T) @ factors.b.double().T
                    result[row, start : start + outputs] += added
                start += outputs
        return result

    def is_empty(self, slot: int) -> bool:
        return not any(self.adapters[slot])


def build(
    inputs: int,
    slices: tuple[int, ...],
    ranks: Sequence[Sequence[int]],
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Model:
    """`ranks[slot][slice]`; zero for a slice without an adapter. Unused arena bytes are NaN."""
    random = torch.Generator().manual_seed(seed)

    def factors(rank: int, outputs: int) -> Factors | None:
        if rank == 0:
            return None
        a, b = torch.randn(rank, inputs, generator=random), torch.randn(outputs, rank, generator=random)
        return Factors((a / inputs**0.5).to(dtype), (b / rank**0.5).to(dtype))

    adapters = [[factors(r, n) for r, n in zip(each, slices, strict=True)] for each in ranks]
    parts = [layout.parts(inputs, slices, each, dtype) for each in ranks]
    arena = torch.full((128 + sum(map(total_bytes, parts)) + 256,), 0xFF, dtype=torch.uint8)
    table = torch.zeros(len(ranks), layout.width(len(slices)), dtype=torch.int64)
    at = 128
    for slot, stored in enumerate(parts):
        layout.pack(adapters[slot], views(arena, stored, at))
        table[slot] = torch.tensor(layout.describe(ranks[slot], offsets(stored, at)))
        at += total_bytes(stored)
    return Model(inputs, slices, adapters, arena, table)


def interpreted(
    model: Model, x: torch.Tensor, out: torch.Tensor, rows: Rows, max_rank: int | None = None
) -> None:
    pytest.importorskip("triton", reason="Triton's interpreter runs the kernels here")
    ranks = [sum(f.a.shape[0] for f in adapter if f) for adapter in model.adapters]
    scratch = lora.Scratch(max(rows.max_rows, 512), rows.num_slots, max_rank or max(*ranks, 1), CPU)
    scratch.shrunk.fill_(torch.nan)
    scratch.pieces.fill_(torch.nan)
    shrunk = lora.shrink(x, model.arena, model.table, rows, scratch)
    lora.expand(out, shrunk, model.arena, model.table, model.slices)
    assert not scratch.arrived.any()


def by_reference(model: Model, x: torch.Tensor, out: torch.Tensor, rows: Rows) -> None:
    scratch = lora.Scratch(rows.max_rows, rows.num_slots, 1, CPU)
    lora.apply(x, out, model.arena, model.table, rows, model.slices, scratch)


RANKS = [(5, 3), (0, 16), (0, 0), (33, 0), (1, 20)]
BATCHES = {
    "mixed": [0, 1, BASE, 3, 4, 0, 2, BASE, 1],
    "one variant": [3] * 20,
    "all distinct": [4, 3, 2, 1, 0],
    "base only": [BASE] * 4,
    "a variant without adapters": [2, 2, 2],
    "many": some_slots(1, 40, 5),
}


@pytest.mark.parametrize("run", [by_reference, interpreted])
@pytest.mark.parametrize("slots", BATCHES.values(), ids=BATCHES)
def test_equals_dense_products(run: Run, slots: list[int]) -> None:
    check_dense(run, build(70, (48, 20), RANKS), 70, rows_of(slots, 5), slots, FLOAT32_ERROR)


@pytest.mark.parametrize("cut", [pytest.param(poisoned, marks=pytest.mark.slow), with_large_tiles])
@pytest.mark.parametrize("inputs", [300, pytest.param(1100, marks=pytest.mark.slow)])
def test_splits_tiles_and_padding_equal_the_reference(cut: Callable[[Rows], Rows], inputs: int) -> None:
    """Several pieces of K, and more rows than the batch has, as in a padded CUDA graph."""
    slots = [0, 1, BASE, 1, 1, *[0] * 18]
    model = build(inputs, (130, 16, 7), [(4, 0, 2), (17, 40, 64)])
    check_dense(interpreted, model, inputs, cut(rows_of(slots, 2, padded=30)), slots, FLOAT32_ERROR)


@pytest.mark.parametrize("run", [by_reference, interpreted])
def test_bfloat16_is_near_the_reference(run: Run) -> None:
    slots = some_slots(2, 24, 3)
    model = build(512, (64, 64), [(16, 16), (8, 32), (0, 64)], torch.bfloat16)
    x, y = torch.randn(24, 512).bfloat16(), torch.randn(24, 128).bfloat16()
    out = y.clone()
    run(model, x, out, rows_of(slots, 3))
    torch.testing.assert_close(
        out.double(), model.dense(x, y, slots), rtol=BFLOAT16_ERROR, atol=BFLOAT16_ERROR
    )


@pytest.mark.slow
def test_a_rows_result_does_not_depend_on_its_batch() -> None:
    check_alone_as_among(interpreted, build(600, (32,), [(20,), (7,)]), 600, 40)


def test_scratch_larger_than_any_rank() -> None:
    model = build(64, (32,), [(3,)])
    x, out = torch.randn(2, 64), torch.zeros(2, 32)
    interpreted(model, x, out, rows_of([0, 0], 1), max_rank=200)
    expected = model.dense(x, torch.zeros(2, 32), [0, 0])
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=FLOAT32_ERROR)


@given(
    ranks=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    inputs=st.integers(1, 90),
    outputs=st.integers(1, 50),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_packed_factors_are_read_back(
    ranks: list[int], inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    slices = tuple(outputs + index for index in range(len(ranks)))
    model = build(inputs, slices, [ranks], dtype)
    parts = layout.parts(inputs, slices, ranks, dtype)
    assert sum(part.size_bytes for part in parts) == dtype.itemsize * sum(
        rank * (inputs + width) for rank, width in zip(ranks, slices, strict=True)
    )
    stored = views(model.arena, parts, 128)
    first = 0
    for index, factors in enumerate(model.adapters[0]):
        if factors is not None:
            rank = ranks[index]
            assert torch.equal(stored["a"][first : first + rank], factors.a)
            assert torch.equal(stored[f"b{index}"].T, factors.b)
            assert model.table[0, 2 + 3 * index + 1 : 2 + 3 * index + 3].tolist() == [first, rank]
            first += rank


@pytest.mark.parametrize("rank", [8, 16, 64, 250])
def test_bytes_are_the_arithmetic_at_7b_shapes(rank: int) -> None:
    slices = (4096, 4096, 4096)
    stored = total_bytes(layout.parts(4096, slices, (rank,) * 3, torch.bfloat16))
    assert stored <= 1.02 * 2 * rank * 3 * (4096 + 4096)


@pytest.mark.parametrize("inputs", [64, 576, 1536, 3584, 4096, 11008, 18944])
@pytest.mark.parametrize("block", [16, 64])
def test_every_piece_has_work(inputs: int, block: int) -> None:
    cut = plan(block, inputs, 64)
    assert (cut.splits - 1) * cut.chunk < inputs <= cut.splits * cut.chunk


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="each of 1 slices, got 2 ranks"):
        layout.parts(8, (4,), (1, 2), torch.float32)
    model = build(8, (4,), [(2,)])
    rows, scratch = rows_of([0], 1), lora.Scratch(1, 1, 2, CPU)
    with pytest.raises(ValueError, match="at most 1 rows"):
        lora.shrink(torch.ones(2, 8), model.arena, model.table, rows, scratch)
    with pytest.raises(ValueError, match="add up to"):
        lora.apply(torch.ones(1, 8), torch.ones(1, 4), model.arena, model.table, rows, (3,), scratch)
    parts = layout.parts(8, (4,), (2,), torch.float32)
    into = views(model.arena, parts, 128)
    with pytest.raises(ValueError, match="for rank 2"):
        layout.pack([Factors(torch.ones(3, 8), torch.ones(4, 3))], into)


def test_rows_wait_for_arrays_that_travel() -> None:
    """The table's total rank is negative until they are there."""
    slots = [0, 1, BASE, 1]
    model = build(70, (48, 20), [(5, 3), (2, 16)])
    arena, ranks = model.arena.clone(), model.table[:, layout.TOTAL_RANK].clone()
    model.arena.fill_(0xFF)  # of NaNs
    model.table[:, layout.TOTAL_RANK] *= -1

    def arrive() -> None:
        model.arena.copy_(arena)
        model.table[:, layout.TOTAL_RANK] = ranks

    late = threading.Timer(0.3, arrive)
    late.start()
    check_dense(interpreted, model, 70, rows_of(slots, 2), slots, FLOAT32_ERROR)
    late.join()
