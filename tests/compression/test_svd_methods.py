"""The three methods of format svd_delta, against one another and their budgets."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
import torch

from profiler.variants.types import VariantKind
from testkit.compression.svd_problems import problem
from workers.compression.layer_error import relative_error
from workers.compression.methods.delta_come import delta_come, widths
from workers.compression.methods.deltamix import deltamix
from workers.compression.methods.low_rank import low_rank
from workers.compression.types import Method, Problem
from workers.deltas import svd

SHAPE = (128, 256)
METHODS: list[Callable[[float], Method]] = [low_rank, delta_come, deltamix]
SEEDS = range(3)


def errors(make: Callable[[float], Method], ratio: float) -> float:
    layers = [problem(SHAPE, seed) for seed in SEEDS]
    return statistics.median(relative_error(x, make(ratio).step(x).weight) for x in layers)


@pytest.mark.parametrize("ratio", [1 / 16, 1 / 8])
def test_deltamix_has_least_error_and_low_rank_most(ratio: float) -> None:
    low, come, mix = (errors(make, ratio) for make in METHODS)
    assert mix < come < low


@pytest.mark.parametrize("make", METHODS)
def test_error_falls_with_the_ratio(make: Callable[[float], Method]) -> None:
    found = [errors(make, ratio) for ratio in (1 / 16, 1 / 8, 1 / 4, 1 / 2)]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("ratio", [1 / 16, 1 / 10, 1 / 4, 1.0])
@pytest.mark.parametrize("shape", [SHAPE, (72, 136), (136, 72)])
@pytest.mark.parametrize("make", METHODS)
def test_the_stored_bytes_are_within_the_ratio(
    make: Callable[[float], Method], shape: tuple[int, int], ratio: float
) -> None:
    found = make(ratio).step(problem(shape, 0))
    assert found.encoded is not None
    assert found.size_bytes == sum(t.numel() * t.element_size() for t in found.encoded.parts.values())
    assert 0 < found.size_bytes <= ratio * 2 * shape[0] * shape[1]


@pytest.mark.parametrize("make", METHODS)
def test_delta_json_needs_its_fields(make: Callable[[float], Method]) -> None:
    method = make(1 / 16)
    assert method.kind is VariantKind.SVD_DELTA
    assert method.facts["group_size"] == svd.GROUP
    assert method.calibrated == (method.name != "low-rank")


@pytest.mark.parametrize("make", METHODS)
def test_a_ratio_that_leaves_nothing(make: Callable[[float], Method]) -> None:
    with pytest.raises(ValueError, match="leaves no rank"):
        make(1e-4).step(problem(SHAPE, 0))
    with pytest.raises(ValueError, match="expected a ratio"):
        make(2.0)


@pytest.mark.parametrize("make", METHODS)
def test_numbers_that_are_none(make: Callable[[float], Method]) -> None:
    layer = problem(SHAPE, 0)
    tuned = layer.tuned.clone()
    tuned[0, 0] = float("inf")
    with pytest.raises(ValueError, match="expected finite numbers in the fine-tune"):
        make(1 / 16).step(Problem(layer.name, layer.base, tuned, layer.inputs))


def test_low_rank_is_the_truncated_svd() -> None:
    layer = problem(SHAPE, 0)
    found = low_rank(1 / 16).step(layer)
    rank = SHAPE[0] * SHAPE[1] // (16 * sum(SHAPE))
    u, s, v = torch.linalg.svd(layer.delta, full_matrices=False)
    expected = (u[:, :rank] * s[:rank]) @ v[:rank]
    torch.testing.assert_close(found.weight - layer.base, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", [(4096, 4096), (11008, 4096)])
def test_delta_come_without_scales_has_the_groups_of_the_format(shape: tuple[int, int]) -> None:
    """The first form of `ostinato compress`, with the paper's ranks."""
    expected = [bits for bits, rank in svd.default_groups(shape) for _ in range(rank)]
    assert widths(shape, 1 / 16, codes_only=True) == expected
    assert len(widths(shape, 1 / 16)) < len(expected)
