"""Singular-value deltas: layout, reference and Triton kernels (interpreted) against float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
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
from workers.kernels import svd_delta
from workers.kernels.low_rank import check_slices
from workers.kernels.rows import BASE, Rows
from workers.kernels.svd_delta import layout
from workers.kernels.svd_delta.layout import Matrix, RankGroup
from workers.kernels.svd_delta.plan import MAX_SLICES, admit
from workers.kernels.types import offsets, total_bytes, views
from workers.variants.kinds.svd_delta import admit as admit_variant
from workers.variants.kinds.svd_delta import unpacked

FLOAT32_ERROR = 2e-5
BFLOAT16_ERROR = 2e-2  # t, t times scale and the output are rounded to 8 bits each


@dataclass
class Model:
    """One linear with its deltas, packed."""

    inputs: int
    slices: tuple[int, ...]
    deltas: list[list[list[RankGroup]]]
    arena: torch.Tensor
    table: torch.Tensor

    def dense(self, x: torch.Tensor, y: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
        """The expected result, in float64."""
        result = y.double()
        for row, slot in enumerate(slots):
            start = 0
            for groups, outputs in zip(self.deltas[slot] if slot != BASE else [], self.slices, strict=False):
                for group in groups:
                    added = x[row].double() @ weights(group.v).T @ weights(group.u)
                    result[row, start : start + outputs] += added
                start += outputs
        return result

    def is_empty(self, slot: int) -> bool:
        return not any(self.deltas[slot])


def matrix(bits: int, rank: int, columns: int, random: torch.Generator, size: float) -> Matrix:
    if bits == 16:
        return Matrix((torch.randn(rank, columns, generator=random) * size).half())
    groups = -(-columns // layout.GROUP)
    codes = torch.randint(0, 1 << bits, (rank, columns), generator=random).to(torch.uint8)
    zeros = torch.randint(0, 1 << bits, (rank, groups), generator=random).to(torch.uint8)
    scales = (0.5 + torch.rand(rank, groups, generator=random)) * size / (1 << bits)
    return Matrix(codes, scales.half(), zeros)


def build(
    inputs: int, slices: tuple[int, ...], ranks: Sequence[Sequence[Mapping[int, int]]], seed: int = 0
) -> Model:
    """`ranks[slot][slice]` by bits. Unused arena bytes are 0xFF."""
    random = torch.Generator().manual_seed(seed)

    def group(bits: int, rank: int, outputs: int) -> RankGroup:
        return RankGroup(
            bits,
            matrix(bits, rank, inputs, random, inputs**-0.5),
            matrix(bits, rank, outputs, random, 0.3),
        )

    deltas = [
        [
            [group(bits, rank, n) for bits, rank in by_bits.items()]
            for by_bits, n in zip(e, slices, strict=True)
        ]
        for e in ranks
    ]
    parts = [layout.parts(inputs, slices, each) for each in ranks]
    arena = torch.full((128 + sum(map(total_bytes, parts)) + 256,), 0xFF, dtype=torch.uint8)
    table = torch.zeros(len(ranks), layout.width(len(slices)), dtype=torch.int64)
    at = 128
    for slot, stored in enumerate(parts):
        layout.pack(deltas[slot], views(arena, stored, at))
        assert layout.ranks_of(deltas[slot]) == tuple(dict(each) for each in ranks[slot])
        table[slot] = torch.tensor(layout.describe(ranks[slot], offsets(stored, at)))
        at += total_bytes(stored)
    return Model(inputs, slices, deltas, arena, table)


def weights(stored: Matrix) -> torch.Tensor:
    """float64 [rank, columns]."""
    values = stored.values.double()
    if stored.scales is None or stored.zeros is None:
        return values
    columns = values.shape[1]
    scales, zeros = (
        each.double().repeat_interleave(layout.GROUP, 1)[:, :columns]
        for each in (stored.scales, stored.zeros)
    )
    return (values - zeros) * scales


def interpreted(model: Model, x: torch.Tensor, out: torch.Tensor, rows: Rows) -> None:
    pytest.importorskip("triton", reason="Triton's interpreter runs the kernels here")
    scratch = svd_delta.Scratch(rows.max_rows, 200, CPU, max_slices=len(model.slices))
    assert all(layout.places(layout.ranks_of(delta)) <= scratch.places for delta in model.deltas)
    scratch.shrunk.fill_(torch.nan)
    shrunk = svd_delta.shrink(x, model.arena, model.table, rows, scratch)
    svd_delta.expand(out, shrunk, model.arena, model.table, model.slices)


def by_reference(model: Model, x: torch.Tensor, out: torch.Tensor, rows: Rows) -> None:
    scratch = svd_delta.Scratch(rows.max_rows, 1, CPU)
    svd_delta.apply(x, out, model.arena, model.table, rows, model.slices, scratch)


RANKS = [
    ({8: 2, 2: 40}, {4: 3}),
    ({}, {16: 2, 2: 3}),
    ({}, {}),
    ({16: 1, 4: 1, 3: 33, 8: 9}, {}),
]
BATCHES = {
    "mixed": [0, 1, BASE, 3, 0, 2, BASE, 1],
    "one variant": [3] * 18,
    "all distinct": [3, 0],
    "base only": [BASE] * 4,
    "a variant without deltas": [2, 2],
}


LONG = ("mixed", "one variant", "all distinct")  # for the interpreter


@pytest.mark.parametrize(
    ("run", "slots"),
    [pytest.param(by_reference, slots, id=name) for name, slots in BATCHES.items()]
    + [
        pytest.param(interpreted, slots, id=f"{name}-interpreted", marks=[pytest.mark.slow] * (name in LONG))
        for name, slots in BATCHES.items()
    ],
)
def test_equals_dense_products(run: Run, slots: list[int]) -> None:
    check_dense(run, build(140, (270, 20), RANKS), 140, rows_of(slots, 4), slots, FLOAT32_ERROR)


@pytest.mark.parametrize("cut", [pytest.param(poisoned, marks=pytest.mark.slow), with_large_tiles])
@pytest.mark.parametrize("inputs", [256, pytest.param(600, marks=pytest.mark.slow)])
def test_splits_tiles_and_padding_equal_the_reference(cut: Callable[[Rows], Rows], inputs: int) -> None:
    """Several pieces of the inputs, and more rows than the batch has, as in a padded CUDA graph."""
    slots = [0, 1, BASE, 1, 1, *[0] * 14]
    model = build(inputs, (130, 7), [({2: 9}, {3: 2}), ({}, {2: 33})])
    check_dense(interpreted, model, inputs, cut(rows_of(slots, 2, padded=24)), slots, FLOAT32_ERROR)


@pytest.mark.parametrize("run", [by_reference, pytest.param(interpreted, marks=pytest.mark.slow)])
def test_bfloat16_is_near_the_reference(run: Run) -> None:
    slots = some_slots(2, 20, 2)
    model = build(300, (260,), [({8: 2, 3: 8, 2: 40},), ({16: 4, 4: 20},)])
    x, y = torch.randn(20, 300).bfloat16(), torch.randn(20, 260).bfloat16()
    out = y.clone()
    run(model, x, out, rows_of(slots, 2))
    expected = model.dense(x, y, slots)
    # Roundings are of summands, which a small sum says nothing about: the bound is by the largest output.
    torch.testing.assert_close(
        out.double(), expected, rtol=0, atol=BFLOAT16_ERROR * float(expected.abs().max())
    )


@pytest.mark.slow
def test_a_rows_result_does_not_depend_on_its_batch() -> None:
    check_alone_as_among(interpreted, build(600, (64,), [({3: 4, 2: 20},), ({2: 7},)]), 600, 30)


@given(
    bits=st.sampled_from(layout.BITS),
    rank=st.integers(1, 40),
    columns=st.integers(1, 700),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_packed_matrices_are_read_back(bits: int, rank: int, columns: int, seed: int) -> None:
    written = matrix(bits, rank, columns, torch.Generator().manual_seed(seed), 1.0)
    other = matrix(bits, rank, 5, torch.Generator().manual_seed(seed), 1.0)
    parts = layout.parts(columns, (5,), ({bits: rank},))
    arena = torch.full((total_bytes(parts),), 0xFF, dtype=torch.uint8)
    stored = views(arena, parts, 0)
    layout.pack([[RankGroup(bits, written, other)]], stored)
    back = stored["v0.half"] if bits == 16 else layout.read({bits: rank}, columns, stored["v0"])
    torch.testing.assert_close(back.double(), weights(written), rtol=1e-6, atol=1e-5)


def test_groups_of_the_same_bits_are_one() -> None:
    random = torch.Generator().manual_seed(0)
    written = [
        (bits, matrix(bits, rank, 200, random, 1.0)) for bits, rank in ((2, 3), (8, 2), (2, 4), (3, 5))
    ]
    ranks = layout.ranks_of([[RankGroup(bits, each, each) for bits, each in written]])
    assert ranks == ({2: 7, 8: 2, 3: 5},)
    parts = layout.parts(200, (200,), ranks)
    stored = views(torch.zeros(total_bytes(parts), dtype=torch.uint8), parts, 0)
    layout.pack([[RankGroup(bits, each, each) for bits, each in written]], stored)
    expected = torch.cat([weights(written[index][1]) for index in (1, 3, 0, 2)])
    torch.testing.assert_close(
        layout.read(ranks[0], 200, stored["u0"]).double(), expected, rtol=1e-6, atol=1e-5
    )


SCHEDULES = {
    "attention": {8: 2, 3: 32, 2: 968},
    "mlp": {8: 2, 3: 32, 2: 1428},
    "mixed": {16: 4, 4: 100, 2: 300},
}


@pytest.mark.parametrize("by_bits", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize(
    ("inputs", "slices"),
    [
        (4096, (4096, 4096, 4096)),
        (4096, (11008, 11008)),
        (11008, (4096,)),
        (3584, (3584, 512, 512)),
        (18944, (3584,)),
    ],
)
def test_bytes_are_the_arithmetic_at_7b_shapes(
    inputs: int, slices: tuple[int, ...], by_bits: dict[int, int]
) -> None:
    stored = total_bytes(layout.parts(inputs, slices, (by_bits,) * len(slices)))
    bits = sum(
        rank * (inputs + outputs) * (bits + (0 if bits == 16 else 24 / layout.GROUP))
        for outputs in slices
        for bits, rank in by_bits.items()
    )
    assert 0.98 * bits / 8 <= stored <= 1.02 * bits / 8


@pytest.mark.parametrize("by_bits", [SCHEDULES["attention"], SCHEDULES["mlp"]])
def test_scratch_for_a_rank_admits_published_schedules_of_it(by_bits: dict[int, int]) -> None:
    admit([by_bits] * 3, sum(by_bits.values()))


def test_a_variant_that_scratch_has_no_room_for_is_refused() -> None:
    groups = [SimpleNamespace(bits=bits, rank=rank) for bits, rank in ((8, 2), (2, 30), (8, 200))]
    manifest: Any = SimpleNamespace(modules={"q_proj": SimpleNamespace(groups=groups)})
    admit_variant(manifest, 800)
    with pytest.raises(ValueError, match=r"q_proj: .* take 896 places"):
        admit_variant(manifest, 240)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_bit_streams_are_unpacked(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, 40), dtype=np.uint8)
    ones = np.unpackbits(codes[:, :, None], axis=2, bitorder="little")[:, :, :bits]
    stream = np.packbits(ones.reshape(3, -1), axis=1, bitorder="little")
    assert np.array_equal(unpacked(torch.from_numpy(stream), bits).numpy(), codes)


def test_shapes_that_do_not_fit_are_refused() -> None:
    random = torch.Generator()
    with pytest.raises(ValueError, match="each of 2 slices, got ranks for 1"):
        layout.parts(8, (4, 4), ({2: 1},))
    with pytest.raises(ValueError, match=r"expected ranks with bits of .* got \[5\]"):
        layout.parts(8, (4,), ({5: 1},))
    with pytest.raises(ValueError, match="take 640 places of scratch memory, which has 384"):
        admit(({2: 64}, {8: 100, 16: 1}), 64)
    with pytest.raises(ValueError, match="at most 4"):
        check_slices((1,) * 5, torch.ones(1, 5), MAX_SLICES)
    model = build(8, (4,), [({2: 1},)])
    rows, scratch = rows_of([0], 1), svd_delta.Scratch(1, 32, CPU)
    with pytest.raises(ValueError, match="at most 1 rows"):
        svd_delta.shrink(torch.ones(2, 8), model.arena, model.table, rows, scratch)
    with pytest.raises(ValueError, match="add up to"):
        svd_delta.apply(torch.ones(1, 8), torch.ones(1, 4), model.arena, model.table, rows, (3,), scratch)
    into = views(torch.zeros(4096, dtype=torch.uint8), layout.parts(8, (4,), ({2: 1},)), 0)
    good, wide = matrix(2, 1, 4, random, 1.0), matrix(2, 1, 300, random, 1.0)
    with pytest.raises(ValueError, match=r"digits of .* columns to take"):
        layout.pack([[RankGroup(2, wide, good)]], into)
    small = matrix(2, 1, 8, random, 1.0)
    with pytest.raises(ValueError, match="expected codes and zero points of 2 bits"):
        layout.pack([[RankGroup(2, Matrix(small.values + 4, small.scales, small.zeros), good)]], into)
    with pytest.raises(ValueError, match="expected scales and zeros of shape"):
        layout.pack([[RankGroup(2, Matrix(small.values), good)]], into)
    big = Matrix(matrix(8, 1, 8, random, 1.0).values, torch.full((1, 1), 2000.0).half(), small.zeros)
    eight = views(torch.zeros(4096, dtype=torch.uint8), layout.parts(8, (8,), ({8: 1},)), 0)
    with pytest.raises(ValueError, match="expected finite scales"):
        layout.pack([[RankGroup(8, big, big)]], eight)
