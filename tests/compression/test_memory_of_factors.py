"""The memory that a registration reserves covers what the widest layer's factors take, as torch counts it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from controlplane.planning import compressing
from workers.compression import factors, optimal_brain

WIDTH = 512
SQUARE_BYTES = 4 * WIDTH * WIDTH


def peak_bytes(do: Callable[[], object]) -> int:
    """The most that was allocated at once beyond what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        do()
    assert found.profiler is not None
    assert found.profiler.kineto_results is not None
    now = peak = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


@pytest.mark.slow
@pytest.mark.parametrize("factor", [optimal_brain.inverse_factor, factors.error_feedback])
def test_the_squares_reserved_are_those_that_a_factor_takes(
    factor: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    inputs = torch.randn(WIDTH, 2 * WIDTH, generator=torch.Generator().manual_seed(3))
    gram = inputs @ inputs.T
    factor(gram)  # what is made once, at the first call, is none of it
    taken = peak_bytes(lambda: factor(gram)) / SQUARE_BYTES
    assert taken > 4, "it was counted"
    assert 1 + taken < compressing.SQUARES + 0.5, "the Gram matrix itself is there, too"
