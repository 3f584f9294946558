"""Both solvers of equation 8 find the optimum: brute force where that is possible, else each other."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.compression.allocation import allocate, allocate_by_highs
from workers.compression.program import BitProgram, budget_bits, rank_bits


def least_error(program: BitProgram) -> float:
    """The best of all choices that the program allows."""
    ranks, widths = program.errors.shape
    choices = (np.array(found, dtype=np.int64) for found in product(range(widths), repeat=ranks))
    return min(program.error(choice) for choice in choices if program.allows(choice))


@st.composite
def small_programs(draw: st.DrawFn) -> BitProgram:
    """Whole numbers make many ties; errors need not fall with the bits."""
    ranks, coded = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    errors = draw(st.lists(st.integers(0, 12), min_size=ranks * (coded + 1), max_size=ranks * (coded + 1)))
    costs = (0, *draw(st.lists(st.integers(0, 9), min_size=coded, max_size=coded)))
    table = np.array(errors, dtype=float).reshape(ranks, coded + 1)
    return BitProgram(table, costs, draw(st.integers(0, 40)), draw(st.integers(1, 3)))


@given(small_programs())
def test_ours_is_the_optimum(program: BitProgram) -> None:
    choice = allocate(program)
    assert program.allows(choice)
    assert program.error(choice) == pytest.approx(least_error(program))


@given(small_programs())
def test_the_allocation_equals_the_optimum_of_highs(program: BitProgram) -> None:
    choice = allocate_by_highs(program)
    assert program.allows(choice)
    assert program.error(choice) == pytest.approx(least_error(program), abs=1e-6)


def realistic(ranks: int, shape: tuple[int, int], ratio: float, max_widths: int, seed: int) -> BitProgram:
    random = np.random.default_rng(seed)
    energy = (1 + np.arange(ranks)) ** -1.2
    left = np.array([1, 0.12, 0.03, 0.008, 3e-5, 1e-7])
    errors = energy[:, None] * left * random.lognormal(0, 0.2, (ranks, len(left)))
    costs = tuple(rank_bits(shape, bits) for bits in (0, 2, 3, 4, 8, 16))
    return BitProgram(errors, costs, budget_bits(shape, ratio), max_widths)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("max_widths", [1, 2, 5])
def test_the_solvers_agree(seed: int, max_widths: int) -> None:
    """Where odd shapes make costs that share few factors."""
    program = realistic(60, (130, 250), 1 / 16, max_widths, seed)
    ours, highs = allocate(program), allocate_by_highs(program)
    assert program.allows(ours)
    assert program.allows(highs)
    assert program.error(ours) == pytest.approx(program.error(highs), rel=1e-6)


def test_no_choice_is_better_where_ranks_are_many() -> None:
    """The optimum by dynamic programming over whole units of the budget, another exact method."""
    program = realistic(384, (384, 768), 1 / 16, 5, seed=0)
    unit = int(np.gcd.reduce(program.bits_per_rank))
    least = np.zeros(program.budget_bits // unit + 1)
    for errors in program.errors:
        tried = np.full((len(errors), len(least)), np.inf)
        for column, (error, bits) in enumerate(zip(errors, program.bits_per_rank, strict=True)):
            start = bits // unit
            tried[column, start:] = least[: len(least) - start] + error
        least = tried.min(axis=0)
    assert program.error(allocate(program)) == pytest.approx(least[-1], rel=1e-9)


def test_ranks_that_are_all_alike() -> None:
    """Then only how many have each width counts, which can be tried: here two widths, of 2 and 3 bits."""
    ranks, costs, errors = 400, (0, 2 * 96 + 7, 3 * 96 + 7), np.array([1.0, 0.12, 0.03])
    program = BitProgram(np.tile(errors, (ranks, 1)), costs, 40_000, 2)
    tried = (
        (ranks - two - three) * errors[0] + two * errors[1] + three * errors[2]
        for two, three in product(range(ranks + 1), repeat=2)
        if two + three <= ranks and two * costs[1] + three * costs[2] <= program.budget_bits
    )
    choice = allocate(program)
    assert program.allows(choice)
    assert program.error(choice) == pytest.approx(min(tried), rel=1e-9)


def test_each_rank_has_its_best_width_if_bits_suffice() -> None:
    program = realistic(20, (64, 64), 1.0, 5, seed=0)
    assert program.error(allocate(program)) == program.errors.min(axis=1).sum()


def test_all_ranks_are_dropped_without_bits() -> None:
    program = BitProgram(np.array([[3.0, 1.0], [2.0, 1.0]]), (0, 4), 3, 1)
    assert allocate(program).tolist() == [0, 0]


def test_highs_reports_its_time_limit() -> None:
    with pytest.raises(RuntimeError, match="HiGHS proved no allocation"):
        allocate_by_highs(realistic(200, (384, 768), 1 / 16, 2, seed=0), limit_s=1e-3)
