"""Each relaxation that is offered does suffice, and what may be applied is."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from placement.solver.cluster import Cluster, Gpu, Node
from placement.solver.decide import decide, eased
from placement.solver.objective import cost
from placement.solver.outcome import NotPlaced
from placement.solver.policies.joint import Joint
from placement.solver.relaxing import SEARCHES, relaxations, relaxed
from placement.solver.request import Request
from placement.types import Constraint, Placement, Slos
from testkit.solver_instances import GIB, LINKS, TYPES, model, random_cluster, random_request


def hard(rng: random.Random, request: Request) -> Request:
    """The request has a limit, or several, that are seldom met."""
    hardships = (
        {"slos": Slos(latency_s=0.5)},
        {"slos": Slos(cost=3.0)},
        {"slos": Slos(latency_s=0.5, tpot_s=0.002, cost=5.0)},
        {"slos": Slos(tpot_s=0.002), "rate_per_s": 40.0},
        {"rate_per_s": 40.0},
        {"concurrency": 1500},
        {"headroom": 0.6},
        {"only_tp": (1,), "only_pp": (1,), "concurrency": 64, "slos": Slos(accuracy=0.95)},
    )
    return replace(request, **rng.choice(hardships))


def refusals(count: int) -> list[tuple[Cluster, Request, NotPlaced]]:
    found = []
    for seed in range(count):
        rng = random.Random(seed)
        cluster, request = random_cluster(rng, 4), hard(rng, random_request(rng))
        outcome = decide(cluster, request, Joint())
        if isinstance(outcome, NotPlaced):
            found.append((cluster, request, outcome))
    return found


REFUSALS = refusals(160)


def test_every_relaxation_suffices_alone_or_with_the_others_it_is_named_with() -> None:
    seen: set[Constraint] = set()
    for cluster, request, outcome in REFUSALS:
        groups = [outcome.relaxations] if outcome.together else [(one,) for one in outcome.relaxations]
        for group in groups:
            easier = request
            for one in group:
                easier = relaxed(easier, one, cluster.gpu_count)
                seen.add(one.constraint)
            if group:
                assert isinstance(decide(cluster, easier, Joint()), Placement), group
    # The search relaxes no compression, and no lengths: `controlplane.planning.shorter_context` does that.
    lengths = {Constraint.CONTEXT, Constraint.ENGINE_CONTEXT, Constraint.MAX_OUTPUT}
    never = {*lengths, Constraint.COMPRESSION}
    assert seen >= set(Constraint) - never - {Constraint.TTFT, Constraint.PARALLELISM}


def test_a_plan_that_is_wider_than_allowed_is_offered() -> None:
    """32 layers of 400 MiB on two GPUs with 10 GiB each: no one of them holds all."""
    gpus = tuple(Gpu(index, "big", 48 * GIB, 10 * GIB) for index in range(2))
    pair = Cluster((Node("n", gpus),), TYPES, LINKS)
    uncompressed = replace(model(), compressions=model().compressions[:1])
    asked = Request("m", uncompressed, concurrency=1, max_tp=1, max_pp=1)
    outcome = decide(pair, asked, Joint())
    assert isinstance(outcome, NotPlaced)
    assert outcome.binding is Constraint.PARALLELISM
    found = eased(pair, asked, outcome, Joint())
    assert found is not None
    assert found.plan.world_size == 2


def test_the_nearest_is_applied_within_the_factor_that_is_allowed() -> None:
    applied = 0
    for cluster, request, outcome in REFUSALS:
        if not outcome.relaxations or outcome.together:
            continue
        nearest = outcome.relaxations[0]
        kept = nearest.constraint is Constraint.ANTI_AFFINITY
        found = eased(cluster, request, outcome, Joint(), max_factor=nearest.factor)
        assert (found is None) == kept
        if found is not None:
            assert found.choice.relaxed == (nearest,)
            applied += 1
        if nearest.factor > 1.01:
            assert eased(cluster, request, outcome, Joint(), max_factor=(1 + nearest.factor) / 2) is None
    assert applied > 5


@pytest.mark.parametrize("limit", ["latency_s", "ttft_s", "tpot_s"])
def test_a_relaxed_limit_is_met_when_it_is_set_to_what_was_offered(limit: str) -> None:
    rng = random.Random(1)
    cluster, request = random_cluster(rng, 4), replace(random_request(rng), slos=Slos(**{limit: 1e-9}))
    outcome = decide(cluster, request, Joint())
    assert isinstance(outcome, NotPlaced)
    found = eased(cluster, request, outcome, Joint())
    assert found is not None
    value = found.choice.latency_s if limit == "latency_s" else getattr(found.estimate, limit)
    assert value <= found.choice.relaxed[0].offered * 1.001


def test_a_limit_that_is_just_met_is_not_out_of_reach() -> None:
    """Shapes are left out by bounds; never one of which a layout is known that keeps the limit."""
    placed = 0
    for seed in range(40):
        rng = random.Random(seed)
        cluster, asked = random_cluster(rng, 4), replace(random_request(rng), slos=Slos())
        found = Joint().find(cluster, asked)
        if found is not None:
            placed += 1
            check_just_met(cluster, asked, found)
    assert placed > 20


def check_just_met(cluster: Cluster, asked: Request, found: Placement) -> None:
    spent = cost(asked.cost, found.plan.world_size, sum(found.estimate.memory_bytes), found.choice.latency_s)
    for limit in (
        Slos(latency_s=found.choice.latency_s),
        Slos(ttft_s=found.estimate.ttft_s),
        Slos(tpot_s=found.estimate.tpot_s),
        Slos(cost=spent),
    ):
        assert Joint().find(cluster, replace(asked, slos=limit)) is not None


def test_searches_are_bounded_and_what_is_offered_still_suffices() -> None:
    """A search that succeeds with any one of three constraints moved far enough: halving each takes 45."""
    gpu = Cluster((Node("n", (Gpu(0, "big", 48 * GIB, 48 * GIB),)),), TYPES, LINKS)
    asked = Request("m", model(), rate_per_s=1e9, headroom=0.9, concurrency=2**30)
    some = Joint().find(gpu, Request("m", model()))
    searches: list[Request] = []

    def suffices(request: Request) -> bool:
        return request.rate_per_s <= 3e8 or request.headroom <= 0.3 or request.concurrency <= 1000

    def find(request: Request) -> Placement | None:
        searches.append(request)
        return some if suffices(request) else None

    offered = relaxations(asked, find, 1)
    assert {one.constraint for one in offered} == {Constraint.RATE, Constraint.HEADROOM, Constraint.MEMORY}
    assert len(searches) == SEARCHES
    assert all(suffices(relaxed(asked, one, 1)) for one in offered)
