"""Cholesky factors of matrices that rounding has left not quite positive definite."""

from __future__ import annotations

import pytest
import torch

from workers.compression.definite import lower_factor


def random_gram(size: int, tokens: int, seed: int) -> torch.Tensor:
    """X X^T / tokens, of full rank where there are more tokens than inputs."""
    inputs = torch.randn(size, tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return inputs @ inputs.T / tokens


def test_a_definite_matrix_gets_nothing_added() -> None:
    gram = random_gram(12, 40, 1)
    lower = lower_factor(gram)
    assert torch.equal(lower, lower.tril())
    torch.testing.assert_close(lower @ lower.T, gram, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("below", [1e-7, 1e-4, 1e-2])
def test_a_matrix_below_zero_by_rounding_gets_little_more_than_it_lacks(below: float) -> None:
    gram = random_gram(12, 40, 2)
    values, vectors = torch.linalg.eigh(gram)
    mean = float(values.mean())
    values[0] = -below * mean
    lower = lower_factor(vectors @ torch.diag(values) @ vectors.T)
    added = torch.linalg.eigvalsh(lower @ lower.T)[0] - values[0]
    assert below * mean <= float(added) <= 10 * below * mean * (1 + 1e-6)


def test_inputs_that_are_all_zero_have_a_factor() -> None:
    assert bool(lower_factor(torch.zeros(4, 4)).isfinite().all())


@pytest.mark.parametrize("bad", [-torch.eye(3), torch.full((3, 3), float("nan"))], ids=["negative", "nan"])
def test_a_matrix_that_is_no_gram_matrix_is_refused(bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="calibration"):
        lower_factor(bad)
