"""The column loop, against the same mathematics done naively: inverses updated one column at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from testkit.compression.compression_brute_force import Array, correlated
from workers.compression.optimal_brain import Fix, blocks, dead_columns, eliminate, inverse_factor
from workers.kernels.column_loop import reference


def damped(gram: Array, damping: float = 0.01) -> Array:
    hessian: Array = 2 * gram + damping * 2 * np.diag(gram).mean() * np.eye(len(gram))
    return hessian


def by_hand(
    weights: Array, gram: Array, round_to: Callable[[Array], Callable[[Array], Array]], group_size: int
) -> tuple[Array, Array]:
    """Optimal brain surgeon's steps: fix a column, spread its error by the inverse Hessian of what is left,
    and take the column out of that inverse by Gaussian elimination."""
    work, left = weights.copy(), np.linalg.inv(damped(gram))
    pivots, answers = [], []
    for j in range(len(gram)):
        pivots.append(left[j, j])
        answers.append(left[j] / left[j, j])
        left -= np.outer(left[:, j], left[j]) / left[j, j]
    kept = np.zeros(work.shape, dtype=bool)
    rounded: Callable[[Array], Array] | None = None
    for j in range(work.shape[1]):
        if j % group_size == 0:
            rounded = round_to(work[:, j : j + group_size])
        if j % 4 == 0:
            cost = work[:, j : j + 4] ** 2 / np.array(pivots[j : j + 4])
            for row, best in enumerate(np.argsort(-cost, axis=1)[:, :2]):
                kept[row, j + best] = True
        assert rounded is not None
        value = rounded(np.where(kept[:, j], work[:, j], 0))
        work[:, j + 1 :] -= np.outer(work[:, j] - value, answers[j][j + 1 :])
        work[:, j] = value
    return work, kept


def steps_of(group: Array, levels: int = 7) -> Callable[[Array], Array]:
    """A symmetric grid with a scale per row from the group's largest weight."""
    scale = np.abs(group).max(axis=1) / levels
    return lambda column: np.round(column / scale) * scale


def steps_of_tensors(group: torch.Tensor) -> Fix:
    scale = group.abs().amax(dim=0) / 7
    return functools.partial(reference.apply, round_column=lambda column: (column / scale).round() * scale)


@given(
    rows=st.integers(1, 6),
    fours=st.integers(1, 75),
    group=st.sampled_from((None, 4, 12, 24, 128, 136, 160, 256)),
    seed=st.integers(0, 2**31),
)
def test_the_result_equals_the_surgeon_with_explicit_inverses(
    rows: int, fours: int, group: int | None, seed: int
) -> None:
    """In float64: in float32 a value between two steps may go to either, and what follows differs."""
    columns = 4 * fours
    weights = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).double()
    gram = correlated(columns, seed + 1).double()
    found, kept = eliminate(weights, gram, steps_of_tensors, group)
    expected, kept_by_hand = by_hand(weights.numpy(), gram.numpy(), steps_of, group or columns)
    assert np.array_equal(kept.numpy(), kept_by_hand)
    assert np.allclose(found.numpy(), expected, rtol=0, atol=1e-7)


@given(columns=st.integers(1, 12), seed=st.integers(0, 2**31))
def test_the_factor_is_the_inverses_upper_one(columns: int, seed: int) -> None:
    gram = correlated(4 * columns, seed)
    factor = inverse_factor(gram)
    hessian = damped(gram.double().numpy())
    assert torch.equal(factor, factor.triu())
    assert np.allclose(factor.T.numpy() @ factor.numpy() @ hessian, np.eye(4 * columns), atol=1e-8)


def test_a_matrix_on_the_grid_and_in_the_pattern_stays() -> None:
    """Nothing is lost, so nothing is to make up for."""
    codes = torch.tensor([[7.0, 0, -3, 0, 0, 1, 0, 2], [0, 0, 0, 0, -7, 0, 0, 4]])
    found, kept = eliminate(codes, correlated(8, 1), steps_of_tensors)
    assert torch.equal(found, codes)
    assert bool(kept[codes != 0].all())
    assert bool((kept.view(2, 2, 4).sum(dim=2) == 2).all())


def test_float32_loses_at_most_as_much_as_float64() -> None:
    weights = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    gram = correlated(256, 1)
    errors = []
    for dtype in (torch.float32, torch.float64):
        found, _ = eliminate(weights.to(dtype), gram, steps_of_tensors)
        difference = found.double() - weights.double()
        errors.append(float(((difference @ gram.double()) * difference).sum()))
    assert errors[0] == pytest.approx(errors[1], rel=0.01)


def test_dead_inputs_get_no_weights_and_no_influence() -> None:
    """The living columns are coded as if the dead columns' weights had been 0 and their inputs
    independent."""
    weights = torch.randn(5, 16, generator=torch.Generator().manual_seed(3)).double()
    gram, dead = correlated(16, 4).double(), [1, 6, 7, 8]
    gram[dead] = 0
    gram[:, dead] = 0
    assert dead_columns(gram).nonzero().flatten().tolist() == dead
    found, kept = eliminate(weights, gram, steps_of_tensors)
    assert bool((found[:, dead] == 0).all())
    assert bool((~kept[:, [1, 8]]).all())  # two of their four's others live
    weights[:, dead] = 0
    gram[dead, dead] = gram.diagonal()[[j for j in range(16) if j not in dead]].mean()
    expected, _ = by_hand(weights.numpy(), gram.numpy(), steps_of, 16)
    assert np.allclose(found.numpy(), expected, atol=1e-9)


def test_inputs_that_were_all_dead_count_alike() -> None:
    weights = torch.randn(3, 8, generator=torch.Generator().manual_seed(3))
    found, _ = eliminate(weights, torch.zeros(8, 8), steps_of_tensors)
    expected, _ = eliminate(weights, torch.eye(8), steps_of_tensors)
    assert torch.equal(found, expected)


@given(columns=st.integers(1, 700), group=st.integers(1, 300))
def test_blocks_cover_the_columns_and_cut_no_small_group(columns: int, group: int) -> None:
    found = list(blocks(columns, group))
    assert [column for start, end in found for column in range(start, end)] == list(range(columns))
    assert all(end - start <= 128 for start, end in found)
    for begin in range(0, columns, group):
        inside = [(start, end) for start, end in found if start < begin < end]
        assert all(min(begin + group, columns) <= end for _, end in inside)


def test_damping_rises_until_the_hessian_is_positive() -> None:
    gram = torch.eye(8, dtype=torch.float64)
    gram[0, 1] = gram[1, 0] = 1.05  # eigenvalue -0.05: a hundredth of the mean is not enough, a tenth is
    factor = inverse_factor(gram).numpy()
    assert np.allclose(factor.T @ factor @ damped(gram.numpy(), 0.1), np.eye(8))


@pytest.mark.parametrize(
    ("weights", "gram", "said"),
    [
        (torch.ones(2, 8), -torch.eye(8), "positive semidefinite"),
        (torch.ones(2, 8), torch.eye(8) * float("nan"), "finite X X"),
        (torch.full((2, 8), float("inf")), torch.eye(8), "finite weights"),
        (torch.ones(2, 8), torch.eye(4), "for 8 inputs"),
        (torch.ones(2, 6), torch.eye(6), "multiples of 4"),
    ],
)
def test_an_impossible_setting_is_refused(weights: torch.Tensor, gram: torch.Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        eliminate(weights, gram, steps_of_tensors)
