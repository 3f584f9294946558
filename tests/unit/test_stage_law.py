"""The law of shallow pipelines is found again on machines that have one, and not on those that have none."""

from __future__ import annotations

import pytest

from controlplane.baselines.estimators.latency_fit import LayerWork
from controlplane.baselines.estimators.ostinato import Ostinato
from controlplane.baselines.estimators.stage_law import StageLaw
from controlplane.baselines.estimators.types import Family, Query
from testkit import artifact_simulator as sim
from testkit.artifact_simulator import Bench

MODELS = ("falcon-40b", "gptj-6b", "llama-2-7b", "llama-2-70b")
LLAMA = Family("llama-2-7b", "float16", False)


def law_of(machine: sim.Machine, models: tuple[str, ...] = MODELS, noise: float = 0.004) -> StageLaw:
    bench = Bench(machine, noise, prompt_tokens=128, seed=1)
    return Ostinato(bench.measure(sim.fingerprints(False, (1,), models))).stages


ONE = ("llama-2-7b",)


@pytest.mark.parametrize("models", [MODELS, ONE])
def test_stages_that_add_up_have_no_law(models: tuple[str, ...]) -> None:
    law = law_of(sim.A6000, models)
    assert (law.floor_s, law.wait) == (0.0, 0.0)
    assert law.error < 0.01


def test_slow_hops_are_not_taken_for_a_floor() -> None:
    law = law_of(sim.SLOW_HOPS)
    assert (law.floor_s, law.wait) == (0.0, 0.0)


@pytest.mark.parametrize("models", [MODELS, ONE])
def test_the_floor_of_a_slow_host_is_found(models: tuple[str, ...]) -> None:
    law = law_of(sim.SLOW_HOST, models)
    assert law.floor_s == pytest.approx(sim.SLOW_HOST.stage_floor_s, rel=0.1)
    assert law.wait == 0.0


@pytest.mark.parametrize("models", [MODELS, ONE])
def test_the_share_that_stages_wait_is_found(models: tuple[str, ...]) -> None:
    law = law_of(sim.WAITING, models)
    assert law.wait == pytest.approx(sim.WAITING.wait, abs=0.1)
    assert law.floor_s == 0.0


def test_an_unknown_plan_is_an_error() -> None:
    assert law_of(sim.SLOW_FIRST_STAGE).error > 0.03


@pytest.mark.parametrize(
    ("law", "stages", "work"),
    [
        (StageLaw(), (3, 1), LayerWork(4, 4, 0)),
        (StageLaw(wait=1.0), (3, 1), LayerWork(6, 6, 0)),
        (StageLaw(wait=0.5), (3, 1), LayerWork(5, 5, 0)),
        # 10 s of floor: stages of 3 s and 1 s a token take it at each of 4 passes; 12 s of a prompt do not.
        (StageLaw(10.0), (3, 1), LayerWork(3, 0, 10 + 4 * 20)),
        (StageLaw(10.0), (4,), LayerWork(4, 4, 0)),
    ],
)
def test_the_work_of_a_pass_by_hand(law: StageLaw, stages: tuple[int, ...], work: LayerWork) -> None:
    query = Query(LLAMA, 1, stages, output_tokens=5, batch=1)
    assert law.work(query, prompt_s=4.0, token_s=1.0) == work
