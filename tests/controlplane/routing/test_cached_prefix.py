"""The saving of a cached beginning of a prompt, against the prefill of whole and rest in plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.routing.prospect import prospect
from controlplane.routing.scorers.cached_prefix import cached_prefix_s
from controlplane.routing.scorers.total import cost_s
from profiler.step_time.records import PREFILL_KNOTS
from testkit.controlplane.random_snapshots import World, world

SEEDS = st.integers(0, 10_000)


def prefill_s(model: Any, tokens: float) -> float:
    """Full steps, and one for the rest."""
    knots = np.arange(PREFILL_KNOTS + 1) * float(model.prefill_grain)
    full, rest = divmod(tokens, float(model.batched_tokens))
    one = [float(np.interp(n, knots, model.prefill_s)) for n in (float(model.batched_tokens), rest)]
    return full * one[0] + one[1]


def cached_at(made: World, g: int, cached: float) -> Any:
    made.request.home, made.request.cached = g, cached
    return made.request


@settings(deadline=None)
@given(SEEDS, st.floats(0, 3000))
def test_the_prefill_of_what_is_cached_is_saved(seed: int, cached: float) -> None:
    made = world(seed)
    prompt = float(made.request.prompt)
    for g, group in enumerate(made.snapshot.groups):
        model = made.model(g)
        request = cached_at(made, g, cached)
        token_s = float(made.snapshot.variants[group.model, request.variant].token_s)
        had = min(cached, prompt)
        saved = prefill_s(model, prompt) - prefill_s(model, prompt - had) + had * token_s
        expected = float(group.correction) * max(0.0, saved)
        assert cached_prefix_s(made.snapshot, g, request) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@settings(deadline=None)
@given(SEEDS, st.floats(0, 3000))
def test_a_cached_prefix_lowers_the_cost_of_its_group_alone(seed: int, cached: float) -> None:
    made = world(seed)
    groups = range(len(made.snapshot.groups))

    def costs() -> list[float]:
        request = made.request
        return [cost_s(made.snapshot, g, request, prospect(made.snapshot, g, request), False) for g in groups]

    without = costs()
    for home in groups:
        cached_at(made, home, cached)
        for g, (now_s, before_s) in enumerate(zip(costs(), without, strict=True)):
            assert now_s <= before_s if g == home else now_s == before_s
        cached_at(made, home, 0.0)
        assert costs() == without


@pytest.mark.parametrize("absurd", [-1.0, float("nan"), 0.0])
def test_nonsense_saves_nothing(absurd: float) -> None:
    made = world(3)
    for g in range(len(made.snapshot.groups)):
        assert cached_prefix_s(made.snapshot, g, cached_at(made, g, absurd)) == 0.0
