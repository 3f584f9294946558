"""The simulation of `benchmarks.serving`: its step costs, and when it agrees with what was served."""

from __future__ import annotations

import pytest

from benchmarks.serving import simulated
from benchmarks.serving.workload import Request as Asked


@pytest.mark.parametrize("name", list(simulated.ENGINES))
def test_a_request_alone_takes_its_steps(name: str) -> None:
    """Each token after the first: a row, its variant, and what reading its cached tokens takes."""
    engine = simulated.ENGINES[name]
    world = simulated.replayed([Asked(0.0, 1, 128, 101)], simulated.scenario(engine))
    cached_ms = (128 + 50) * 0.5 * 2**20 / 4.2e12 * 1e3
    step_ms = engine.base_ms + engine.variant_ms + simulated.ROW_MS + cached_ms
    found = simulated.figures(world, 60.0)
    assert found["tpot_p90_s"] == pytest.approx(step_ms / 1e3, rel=0.01)
    assert found["unfinished"] == 0


def test_the_simulated_costs_are_the_measured_ones() -> None:
    """28 deltas in a step, and 930 tokens of one delta in a step with 27 others, take their measured time."""
    four = simulated.ENGINES["deltas, 4 bits"]
    together_ms = four.base_ms + 27 * simulated.ROW_MS + 28 * four.variant_ms
    assert together_ms == pytest.approx(25.26, abs=0.01)
    filling_ms = 930 * (simulated.PROMPT_TOKEN_MS + four.token_ms)
    assert filling_ms + 27 * (four.variant_ms + simulated.ROW_MS) == pytest.approx(55.6, abs=0.01)


def test_an_unanswered_request_counts_with_its_waiting_time() -> None:
    """Two requests of 1,000 tokens that take 5 s and more; the second is given up after 3."""
    whole = simulated.ENGINES["whole models"]
    asked = [Asked(0.0, 1, 10, 1000), Asked(10.0, 1, 10, 1000)]
    found = simulated.figures(simulated.replayed(asked, simulated.scenario(whole)), 3.0)
    assert found["unfinished"] == 1
    assert simulated.figures(simulated.replayed(asked, simulated.scenario(whole)), 30.0)["unfinished"] == 0


@pytest.mark.parametrize(
    ("ttft_s", "agrees"), [(0.9, [True, True]), (1.1, [False, True]), (9.0, [False, False])]
)
def test_a_simulation_agrees_where_both_keep_a_promise_or_both_break_it(
    ttft_s: float, agrees: list[bool]
) -> None:
    measured = {"ttft_p90_s": 0.2, "tpot_p90_s": 0.03}
    found = simulated.agree(measured, {"ttft_p90_s": ttft_s, "tpot_p90_s": 0.04})
    assert list(found.values()) == agrees
