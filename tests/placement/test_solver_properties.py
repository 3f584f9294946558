"""Whatever the cluster and the request: no rule is broken, nothing changes, the exact reference agrees."""

from __future__ import annotations

import copy
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.baselines.placement.exact import Exact
from controlplane.baselines.placement.registry import PolicyName, policy
from placement.solver.decide import decide
from placement.solver.default_estimator import estimator_of
from placement.solver.layout import after
from placement.solver.outcome import NotPlaced
from placement.solver.policies.base import EstimatorFor
from placement.solver.policies.joint import Joint
from placement.solver.roofline import Roofline
from placement.types import Placement
from testkit.solver_instances import Pausing, broken_rules, random_cluster, random_request

SEEDS = st.integers(0, 10**6)


@settings(max_examples=12, deadline=None)
@given(seed=SEEDS, name=st.sampled_from(PolicyName))
def test_no_rule_is_broken_and_nothing_changes(seed: int, name: PolicyName) -> None:
    rng = random.Random(seed)
    cluster, request = random_cluster(rng), random_request(rng)
    before = copy.deepcopy((cluster, request))
    outcome = decide(cluster, request, policy(name))
    assert (cluster, request) == before
    assert decide(*before, policy(name)) == outcome
    if isinstance(outcome, Placement):
        assert broken_rules(cluster, request, outcome) == []
        later = after(cluster, request, outcome)
        assert all(gpu.free_bytes >= 0 for node in later.nodes for gpu in node.gpus)
    else:
        assert outcome.reason


@pytest.mark.slow
@settings(max_examples=2 * settings().max_examples, deadline=None)
@given(seed=SEEDS, name=st.sampled_from(PolicyName))
def test_no_rule_is_broken_in_many_more_cases(seed: int, name: PolicyName) -> None:
    rng = random.Random(seed)
    cluster, request = random_cluster(rng, 20), random_request(rng)
    outcome = policy(name).find(cluster, request)
    if outcome is not None:
        assert broken_rules(cluster, request, outcome) == []


@pytest.mark.slow
@settings(max_examples=settings().max_examples, deadline=None)
@given(seed=SEEDS)
def test_deploying_on_until_nothing_fits_never_exceeds_a_gpu(seed: int) -> None:
    rng = random.Random(seed)
    cluster = random_cluster(rng, 12)
    for _ in range(10):
        request = random_request(rng)
        outcome = policy(rng.choice(tuple(PolicyName))).find(cluster, request)
        if outcome is not None:
            assert broken_rules(cluster, request, outcome) == []
            cluster = after(cluster, request, outcome)
    for node in cluster.nodes:
        for gpu in node.gpus:
            assert (
                sum(resident.memory_bytes for resident in gpu.residents) <= gpu.total_bytes - gpu.free_bytes
            )


class TakingTurns(Roofline):
    """Measurements on GPUs show it: with several batches in flight the host takes a part of each token's
    time."""

    @property
    def turn_s(self) -> float:
        return 10e-3


def gap(seed: int, most_gpus: int, estimator_for: EstimatorFor = estimator_of) -> float | None:
    """The relative distance to the optimum; None where nothing fits."""
    rng = random.Random(seed)
    cluster, request = random_cluster(rng, most_gpus), random_request(rng)
    ours, best = (one.find(cluster, request, estimator_for) for one in (Joint(), Exact()))
    assert (ours is None) == (best is None), seed
    if ours is None or best is None:
        return None
    assert broken_rules(cluster, request, best) == []
    assert ours.choice.objective >= best.choice.objective * (1 - 1e-5), f"better than the optimum: {seed}"
    return ours.choice.objective / best.choice.objective - 1


@pytest.mark.parametrize("estimator_for", [estimator_of, TakingTurns, Pausing])
def test_a_few_small_instances_are_within_three_percent_of_the_optimum(estimator_for: EstimatorFor) -> None:
    gaps = [found for seed in range(8) if (found := gap(seed, 3, estimator_for)) is not None]
    assert gaps
    assert statistics.mean(gaps) <= 0.03


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [range(100, 120), pytest.param(range(120, 160), marks=pytest.mark.long)], ids=str
)
@pytest.mark.parametrize("estimator_for", [estimator_of, TakingTurns, Pausing])
def test_small_instances_are_within_three_percent_of_the_optimum_on_average(
    seeds: range, estimator_for: EstimatorFor
) -> None:
    gaps = [found for seed in seeds if (found := gap(seed, 6, estimator_for)) is not None]
    assert statistics.mean(gaps) <= 0.03


def test_a_refusal_lists_relaxations_that_suffice() -> None:
    explained = 0
    for seed in range(200, 230):
        rng = random.Random(seed)
        cluster, request = random_cluster(rng, 3), random_request(rng)
        outcome = decide(cluster, request, Joint())
        if isinstance(outcome, NotPlaced):
            explained += 1
            assert all(relaxation.factor >= 1 for relaxation in outcome.relaxations)
    assert explained
