"""The cost of a rank, and the valid programs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from workers.compression.program import BitProgram, budget_bits, most_ranks, rank_bits
from workers.deltas import svd

ERRORS = np.array([[4.0, 1.0, 0.1], [2.0, 0.5, 0.0]])


@pytest.mark.parametrize("bits", [16, 8, 4, 3, 2])
@pytest.mark.parametrize("shape", [(128, 256), (13, 130), (1, 8)])
def test_a_rank_costs_what_the_format_stores(shape: tuple[int, int], bits: int) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    (group,) = svd.encode(matrix, [(bits, 1)])
    tensors = [t for f in (group.v, group.u) for t in (f.codes, f.scales, f.zeros) if t is not None]
    assert rank_bits(shape, bits) == 8 * sum(t.numel() * t.element_size() for t in tensors)


def test_codes_alone_cost_as_in_the_paper() -> None:
    assert rank_bits((3584, 18944), 3, codes_only=True) == (3584 + 18944) * 3
    assert rank_bits((3584, 18944), 0) == 0


def test_scales_and_zeros_are_three_sixteenths_of_a_bit_per_code() -> None:
    assert rank_bits((3584, 18944), 2) == (3584 + 18944) * (2 + 3 / 16)


def test_the_budget_is_of_the_matrix_in_16_bits() -> None:
    assert budget_bits((64, 32), 1 / 16) == 64 * 32
    assert most_ranks((64, 32), (16, 2), 64 * 32) == 2048 // (96 * 2 + 48)


@pytest.mark.parametrize("ratio", [0.0, -1.0, 1.5, float("nan")])
def test_a_ratio_that_is_none(ratio: float) -> None:
    with pytest.raises(ValueError, match="expected a ratio above 0"):
        budget_bits((64, 32), ratio)


def test_a_budget_for_no_rank() -> None:
    with pytest.raises(ValueError, match="leaves no rank of 2 bits for a matrix of 64 x 32; raise the ratio"):
        most_ranks((64, 32), (2, 4), 100)


def test_a_choice_is_judged_by_all_constraints() -> None:
    program = BitProgram(ERRORS, (0, 2, 5), 7, 1)
    both, first, twice = np.array([2, 1]), np.array([1, 1]), np.array([2, 2])
    assert program.error(both) == pytest.approx(0.6)
    assert program.cost_bits(both) == 7
    assert not program.allows(both), "two widths"
    assert program.allows(first)
    assert not program.allows(twice), "ten bits"


@pytest.mark.parametrize(
    ("errors", "costs", "budget", "widths", "message"),
    [
        (ERRORS, (0, 2), 7, 1, "expected errors of shape"),
        (ERRORS * np.nan, (0, 2, 5), 7, 1, "expected finite errors"),
        (-ERRORS, (0, 2, 5), 7, 1, "expected finite errors"),
        (ERRORS, (1, 2, 5), 7, 1, "expected a width that costs nothing"),
        (ERRORS, (0, 2, 5), -1, 1, "expected a budget"),
        (ERRORS, (0, 2, 5), 7, 0, "expected a budget"),
    ],
)
def test_an_invalid_program_is_refused(
    errors: np.ndarray, costs: tuple[int, ...], budget: int, widths: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        BitProgram(errors, costs, budget, widths)
