"""Compiled copies give, to the bit, what torch's conversions give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.kernels import copying
from workers.kernels.copying import TYPES, Copy, Memory, reference

DTYPES = sorted(TYPES, key=str)
INTEGERS = {2: torch.int16, 4: torch.int32}


def memory_of(values: torch.Tensor) -> Memory:
    """Its bytes, up to a multiple of four."""
    raw = values.contiguous().view(INTEGERS[values.dtype.itemsize]).numpy().view(np.uint8).reshape(-1)
    return np.concatenate([raw, np.zeros(-len(raw) % 4, np.uint8)])


def described(matrix: torch.Tensor, rows: range, columns: range, target: torch.Tensor, **more: Any) -> Copy:
    """A part of the matrix goes from the source's offset to the target's."""
    about = Copy(
        source=0,
        source_type=TYPES[matrix.dtype],
        values=matrix.numel(),
        width=matrix.shape[1],
        first_row=rows.start,
        rows=len(rows),
        first_column=columns.start,
        columns=len(columns),
        into=0,
        into_type=TYPES[target.dtype],
        stride=target.shape[1],
        scaling=1.0,
        transposed=False,
    )
    return about._replace(**more)


def assert_same(
    matrix: torch.Tensor,
    dtype: torch.dtype,
    scaling: float = 1.0,
    transposed: bool = False,
    rows: range | None = None,
    columns: range | None = None,
) -> None:
    rows, columns = rows or range(matrix.shape[0]), columns or range(matrix.shape[1])
    part = matrix[rows.start : rows.stop, columns.start : columns.stop]
    want = torch.empty(part.T.shape if transposed else part.shape, dtype=dtype)
    reference.copy(part, want, scaling, transposed)
    into = memory_of(torch.zeros_like(want))
    copy = described(matrix, rows, columns, want, scaling=scaling, transposed=transposed)
    assert copying.copy([copy], memory_of(matrix), into) is None
    assert np.array_equal(into, memory_of(want))


def every(dtype: torch.dtype) -> torch.Tensor:
    """All finite values of a type of 16 bits."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    return torch.where(torch.isfinite(values), values, torch.zeros_like(values)).view(256, 256)


def floats() -> torch.Tensor:
    """Values of all sizes, including those at which halves lose digits and end."""
    random = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (150, 333), generator=random, dtype=torch.int64)
    any_size = bits.to(torch.int32).view(torch.float32)
    near = torch.randn(150, 333, generator=random) * 2.0 ** torch.randint(
        -30, 20, (150, 333), generator=random
    )
    ties = (every(torch.float16).float() * (1 + 2.0**-11)).view(-1)[: 150 * 333].view(150, 333)
    both = torch.cat([any_size, near, ties])
    return torch.where(torch.isfinite(both), both, torch.zeros_like(both))


@pytest.mark.parametrize("scaling", [1.0, 0.5, 2 / 3, 60000.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_every_value_is_rounded_as_torch_rounds(
    source: torch.dtype, dtype: torch.dtype, scaling: float
) -> None:
    values = floats() if source == torch.float32 else every(source)
    assert_same(values, dtype, scaling)
    assert_same(values, dtype, scaling, transposed=True)


@given(st.data())
def test_any_rows_and_columns_lie_as_they_should(data: st.DataObject) -> None:
    """The sizes include those where all are even: then two values are taken at a time."""
    of = data.draw(st.sampled_from([1, 2]))
    height, width = data.draw(st.integers(1, 100)), data.draw(st.integers(1, 40))
    first_row, first_column = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    rows = range(of * first_row, of * data.draw(st.integers(first_row + 1, height)))
    columns = range(of * first_column, of * data.draw(st.integers(first_column + 1, width)))
    height, width = of * height, of * width
    source, dtype = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(DTYPES))
    matrix = torch.randn(
        height, width, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    )
    transposed = data.draw(st.booleans())
    assert_same(matrix.to(source), dtype, data.draw(st.sampled_from([1.0, 0.7])), transposed, rows, columns)


def test_several_lie_side_by_side() -> None:
    """Bytes outside of the copies stay unchanged."""
    first, second = torch.randn(3, 8), torch.randn(2, 8).half()
    into = torch.full((7, 8), 5.0, dtype=torch.bfloat16)
    memory, source = memory_of(into), np.concatenate([memory_of(first), memory_of(second)])
    one = described(first, range(3), range(8), into, into=16)
    other = described(second, range(2), range(8), into, source=3 * 8 * 4, into=5 * 16)
    assert copying.copy([one, other], source, memory) is None
    into[1:4], into[5:] = first.bfloat16(), second.bfloat16()
    assert np.array_equal(memory, memory_of(into))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("source", DTYPES)
def test_the_first_value_that_is_not_finite_is_reported(source: torch.dtype, bad: float) -> None:
    """The check includes values that no copy takes: another rank would take them."""
    good, matrix = torch.randn(4, 6).to(source), torch.randn(300, 60).to(source)
    matrix[251, 7] = matrix[252, 0] = bad
    into = torch.zeros(300, 60)
    memory = np.concatenate([memory_of(good), memory_of(matrix)])
    copies = [
        described(good, range(4), range(6), into),
        described(matrix, range(5), range(60), into, source=good.numel() * source.itemsize),
    ]
    assert copying.copy(copies, memory, memory_of(into)) == (1, 251 * 60 + 7)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": 5},
        {"columns": 9},
        {"first_row": 1},
        {"first_column": -1},
        {"source": 4},
        {"source": 2, "values": 31},
        {"into": 4},
        {"stride": 7},
        {"values": 33, "rows": 4, "source": 0},
        {"transposed": True, "columns": 8, "rows": 4, "stride": 5},
        {"transposed": True, "stride": 3},
    ],
)
def test_a_copy_outside_its_memory_is_refused(wrong: dict[str, Any]) -> None:
    matrix, into = torch.randn(4, 8), torch.zeros(4, 8)
    memory = memory_of(into)
    copy = described(matrix, range(4), range(8), into)
    assert copying.copy([copy], memory_of(matrix), memory) is None
    before = memory.copy()
    with pytest.raises(ValueError, match="expected each copy within"):
        copying.copy([copy, copy._replace(**wrong)], memory_of(matrix), memory)
    assert np.array_equal(memory, before)


def test_nothing_is_nothing() -> None:
    assert copying.copy([], np.zeros(4, np.uint8), np.zeros(4, np.uint8)) is None
