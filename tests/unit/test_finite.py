"""The compiled search for values that are not finite, compared with numpy's `isfinite`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.variants.finite import EXPONENTS, not_finite

FLOATS: dict[str, type[np.floating[Any]]] = {"F16": np.float16, "F32": np.float32}


@given(
    st.sampled_from(sorted(FLOATS)),
    st.sampled_from((0, 1, 4095, 4096, 4097, 9000)),
    st.lists(
        st.tuples(st.integers(0, 8999), st.sampled_from((np.nan, -np.nan, np.inf, -np.inf))), max_size=3
    ),
)
def test_the_first_is_found(dtype: str, count: int, bad: list[tuple[int, float]]) -> None:
    values = np.random.default_rng(count).standard_normal(count).astype(FLOATS[dtype])
    for at, value in bad:
        values[at : at + 1] = value
    wrong = np.flatnonzero(~np.isfinite(values))
    assert not_finite(memoryview(values.tobytes()), dtype) == (int(wrong[0]) if len(wrong) else None)


def test_the_largest_finite_values_are_taken() -> None:
    for dtype, kind in FLOATS.items():
        most = np.finfo(kind).max
        assert not_finite(memoryview(np.array([most, -most, 0, -0.0], kind).tobytes()), dtype) is None


@pytest.mark.parametrize(("word", "at"), [(0x7F7F, None), (0xFF7F, None), (0x7F80, 1), (0xFFC1, 1)])
def test_a_bfloat16_is_finite_by_its_bits(word: int, at: int | None) -> None:
    assert not_finite(memoryview(np.array([0, word, 0x7F80], np.uint16).tobytes()[:4]), "BF16") == at


def test_bytes_are_always_finite() -> None:
    assert "U8" not in EXPONENTS
    assert not_finite(memoryview(b"\xff" * 8), "U8") is None
