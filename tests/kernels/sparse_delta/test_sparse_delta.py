"""The format, its bytes, and the product in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from testkit.kernels.deltas import PAIRS, delta_of, dense, expected, load, random_delta
from workers.kernels import sparse_delta
from workers.kernels.rows import Rows
from workers.kernels.sparse_delta import Delta, Shape
from workers.kernels.sparse_delta.reference import unpack
from workers.kernels.types import total_bytes

CPU = torch.device("cpu")


@st.composite
def _deltas(draw: st.DrawFn) -> Delta:
    bits = draw(st.sampled_from((2, 4)))
    outputs = draw(st.integers(1, 9))
    inputs = 8 * draw(st.integers(1, 6))
    groups = (outputs, inputs // 4)
    count = outputs * inputs // 4
    kept = np.array(draw(st.lists(st.integers(0, 5), min_size=count, max_size=count)))
    codes = np.array(
        draw(st.lists(st.integers(0, (1 << bits) - 1), min_size=2 * count, max_size=2 * count)), np.uint8
    )
    scales = draw(st.sampled_from([s for s in (1, 2, inputs // 8) if inputs % (4 * s) == 0]))
    per_row = np.arange(1, outputs * scales + 1).reshape(outputs, scales) / 64
    return delta_of(PAIRS[kept.reshape(groups)], codes.reshape(*groups, 2), per_row, bits)


@given(_deltas())
def test_the_arena_holds_exactly_the_format_s_bytes(delta: Delta) -> None:
    arena, table = load([[delta]])
    bits, *offsets, scales = table[0].tolist()
    assert bits == delta.shape.bits
    got = unpack(arena, Shape(delta.shape.outputs, delta.shape.inputs, bits, scales), offsets)
    assert torch.equal(got.double(), dense(delta))


@pytest.mark.parametrize("bits", [2, 4])
def test_a_delta_of_zero_groups_is_zero(bits: int) -> None:
    kept = np.broadcast_to(PAIRS[:, None], (6, 4, 2))
    codes = np.full((6, 4, 2), 1 << (bits - 1), np.uint8)
    arena, table = load([[delta_of(kept, codes, np.ones((6, 1)), bits)]])
    assert not unpack(arena, Shape(6, 16, bits), table[0, 1:4].tolist()).any()


@pytest.mark.parametrize(("bits", "group"), [(4, None), (2, None), (4, 128)])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (22016, 4096), (4096, 11008)])
def test_bytes_are_the_formats(outputs: int, inputs: int, bits: int, group: int | None) -> None:
    shape = Shape(outputs, inputs, bits, inputs // group if group else 1)
    per_element = bits / 2 + 1 + 16 / (group or inputs)
    assert total_bytes(sparse_delta.parts([shape])) == pytest.approx(
        outputs * inputs * per_element / 8, rel=0.02
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_gets_its_own_variants_delta(dtype: torch.dtype) -> None:
    random = np.random.default_rng(1)

    def delta(outputs: int, bits: int, scales: int = 1) -> Delta:
        return random_delta(Shape(outputs, 64, bits, scales), random)

    slices = (31, 8, 10)
    slots: list[list[Delta | None]] = [
        [delta(31, 4), delta(8, 2), None],
        [None, None, None],
        [delta(31, 2), None, delta(10, 4)],
    ]
    arena, table = load(slots)
    of_rows = np.array([2, 0, -1, 1, 0, 2, 0], np.int32)
    rows = Rows(16, 3, CPU)
    rows.update(of_rows)
    x, before = torch.randn(9, 64).to(dtype), torch.randn(9, 49).to(dtype)  # two rows of padding
    out = before.clone()
    sparse_delta.apply(x, out, arena, table, rows, slices)
    want = expected(x, before, slots, of_rows, slices)
    torch.testing.assert_close(out.double(), want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    untouched = [2, 3, 7, 8]
    assert torch.equal(out[untouched], before[untouched])


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ({"outputs": 4, "inputs": 12, "bits": 4}, "multiple of 8 columns, got 12"),
        ({"outputs": 4, "inputs": 16, "bits": 3}, "2 or 4 bits, got 3"),
        ({"outputs": 4, "inputs": 16, "bits": 4, "scales": 3}, "3 scales"),
        ({"outputs": 4, "inputs": 128, "bits": 4, "scales": 4}, "multiple of 64"),
    ],
)
def test_impossible_shapes_are_refused(shape: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Shape(**shape)  # type: ignore[arg-type]


def test_tensors_that_do_not_fit_together_are_refused() -> None:
    bytes_ = torch.zeros(4, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="two bytes of values"):
        _ = Delta(torch.zeros(4, 3, dtype=torch.uint8), bytes_, torch.zeros(4, 1)).shape
    rows = Rows(4, 1, CPU)
    with pytest.raises(ValueError, match="as wide as all slices"):
        sparse_delta.apply(torch.zeros(2, 8), torch.zeros(2, 5), bytes_, bytes_, rows, (4,))
    with pytest.raises(ValueError, match=r"a table of .* got 2"):
        sparse_delta.apply(torch.zeros(2, 8), torch.zeros(2, 4), bytes_, bytes_, rows, (4,))
