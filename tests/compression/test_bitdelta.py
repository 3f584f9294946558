"""BitDelta: signs and the best scale for them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from testkit.compression.compression_brute_force import problem
from workers.compression.methods.bitdelta import bitdelta
from workers.compression.types import Problem


@given(rows=st.integers(1, 5), columns=st.integers(1, 20), seed=st.integers(0, 2**31))
def test_the_code_is_signs_times_the_best_scale(rows: int, columns: int, seed: int) -> None:
    of = problem(rows, columns, seed, torch.eye(columns))
    found = bitdelta().step(of).weight - of.base
    scale = float(found.abs().mean())
    delta = (of.tuned - of.base).double()
    best = minimize_scalar(
        lambda a: float(((delta - a * delta.sign()) ** 2).sum()),
        bounds=(0, 1),
        method="bounded",
        options={"xatol": 1e-9},
    )
    assert scale == pytest.approx(best.x, rel=1e-3, abs=1e-6)
    assert torch.allclose(found, scale * torch.where(delta < 0, -1.0, 1.0), atol=1e-6)


def test_the_code_takes_a_bit_per_weight_and_a_scale() -> None:
    found = bitdelta().step(problem(3, 7, 1, torch.eye(7)))
    assert found.size_bytes == 3 + 2  # 21 bits
    assert found.encoded is None
    assert (bitdelta().kind, bitdelta().calibrated) == (None, False)


def test_a_layer_that_equals_the_base_stays() -> None:
    base = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(bitdelta().step(Problem("a", base, base.clone())).weight, base)


def test_differences_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="finite differences"):
        bitdelta().step(Problem("a", torch.zeros(2, 8), torch.full((2, 8), float("nan"))))
