"""The column loop's kernel (interpreted) against the one in torch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from workers.compression.two_of_four import encode
from workers.deltas import sparse
from workers.kernels import column_loop
from workers.kernels.column_loop import MAX_COLUMNS, kernel, reference

FEW = st.integers(0, 4)
QUANTUM = 1 / 8


def drawn(values: Sequence[float], shape: Sequence[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor(values)[torch.randint(len(values), tuple(shape), generator=generator)]


@given(
    fours=st.integers(1, 4),
    fours_behind=FEW,
    outputs=st.integers(1, 20),
    bits=st.sampled_from((4, 2)),
    seed=st.integers(0, 2**31),
)
@example(fours=MAX_COLUMNS // 4, fours_behind=0, outputs=5, bits=4, seed=1)
def test_the_loop_equals_torch_bit_for_bit(
    fours: int, fours_behind: int, outputs: int, bits: int, seed: int
) -> None:
    """Numbers of which sums are exact in any order. Many costs are equal, and many steps are halves; some
    outputs have scale 0, and some columns nothing but zeros."""
    columns = 4 * fours
    size = min(columns + 4 * fours_behind, MAX_COLUMNS)
    weights = drawn([i * QUANTUM for i in range(-16, 17)], (size, outputs), seed)
    weights *= drawn((0, 1, 1, 1), (size, 1), seed + 1)
    scales = drawn((0, 0.25, 0.5, 0.75, 1.5), (outputs,), seed + 2).half()
    deviations = drawn((0.5, 1, 2), (columns, 1), seed + 3)
    answers = drawn((*[0] * 22, 1, -1), (columns, size), seed + 4).triu(1) + torch.eye(columns, size)
    done = []
    for name in ("kernel", "torch"):
        work = weights.clone()
        kept = torch.zeros(columns, outputs, dtype=torch.bool)
        errors = torch.full((columns, outputs), torch.nan)
        if name == "kernel":
            kernel.apply(work, kept, errors, deviations, answers, scales, bits)
        else:
            column_loop.apply(work, kept, errors, deviations, answers, scales, bits)
        done.append((work, kept, errors))
    for ours, expected in zip(*done, strict=True):
        assert torch.equal(ours, expected)
    assert all(float(t.abs().max()) < 2**23 * QUANTUM for t in done[0][::2])  # sums are exact indeed


@pytest.mark.parametrize(("bits", "group"), [(4, None), (2, None), (4, 8), (2, 72)])
def test_a_matrix_gets_the_same_codes(bits: int, group: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to float32's sums in another order: at most one of a thousand codes may be another, where a value
    lies between two, and the error of equation 1 stays within a ten thousandth."""
    generator = torch.Generator().manual_seed(bits)
    matrix = torch.randn(12, 144, generator=generator) * 0.004
    inputs = torch.randn(600, 144, generator=generator) @ torch.randn(144, 144, generator=generator)
    inputs[:, [3, 70]] = 0  # dead columns
    matrix[5] = 0
    gram = inputs.T @ inputs / 600
    expected = encode(matrix, gram, bits, group, refit=False)
    monkeypatch.setattr(column_loop, "apply", kernel.apply)
    found = encode(matrix, gram, bits, group, refit=False)
    assert float((sparse.decode(found) != sparse.decode(expected)).float().mean()) <= 0.001
    errors = []
    for code in (found, expected):
        lost = (sparse.decode(code) - matrix).double()
        errors.append(float(((lost @ gram.double()) * lost).sum()))
    assert errors[0] == pytest.approx(errors[1], rel=1e-4)


def test_float64_is_torchs() -> None:
    work = torch.randn(8, 3, dtype=torch.float64)
    kept, errors = torch.zeros(4, 3, dtype=torch.bool), torch.zeros(4, 3, dtype=torch.float64)
    expected = work.clone(), kept.clone(), errors.clone()
    deviations, answers = torch.ones(4, 1, dtype=torch.float64), torch.eye(4, 8, dtype=torch.float64)
    scales = torch.full((3,), 0.1).half()
    column_loop.apply(work, kept, errors, deviations, answers, scales, 4)
    reference.apply(*expected, deviations, answers, reference.steps(scales.double(), 4))
    assert torch.equal(work, expected[0])
    assert bool((kept.sum(dim=0) == 2).all())


@pytest.mark.parametrize(("columns", "size"), [(6, 8), (8, 4), (128, 132)])
def test_shapes_that_do_not_fit_are_refused(columns: int, size: int) -> None:
    work, kept = torch.zeros(size, 2), torch.zeros(columns, 2, dtype=torch.bool)
    errors, deviations, answers = torch.zeros(columns, 2), torch.ones(columns, 1), torch.zeros(columns, size)
    with pytest.raises(ValueError, match="expected a multiple of 4"):
        column_loop.apply(work, kept, errors, deviations, answers, torch.ones(2).half(), 4)
