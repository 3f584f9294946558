"""Replicas that are changed later, or asked for where they cannot be had."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from controlplane import errors
from controlplane.management.commands import change_replicas, deploy_model, limit_variants
from controlplane.management.schemas.deploy import DeployModelRequest, Replicas, ReplicasChange
from controlplane.planning.autoscaling import active
from controlplane.state.records import Deployment, Phase, Scaling
from controlplane.state.repository import Put
from controlplane.state.transactions import Context
from controlplane.state.worker_groups import GroupPhase, WorkerGroup
from testkit.controlplane.builders import PLACED, deployment, model, state

BASE = replace(deployment("b", Phase.DEPLOYED), established=True, scaling=Scaling(1, 2, 4.0, 60.0))


def change(**fields: Any) -> ReplicasChange:
    return ReplicasChange.model_validate(fields)


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({"max": 5}, Scaling(1, 5, 4.0, 60.0)),
        ({"min": 2}, Scaling(2, 2, 4.0, 60.0)),
        ({"min": 3, "max": 3}, Scaling(3, 3, 4.0, 60.0)),
        ({"targetInFlight": 8}, Scaling(1, 2, 8.0, 60.0)),
        ({"targetInFlight": None}, Scaling(1, 2, None, 60.0)),
        ({"min": 0, "idleS": 5}, Scaling(0, 2, 4.0, 5.0)),
    ],
)
def test_only_what_is_named_changes(fields: dict[str, Any], scaling: Scaling) -> None:
    assert change_replicas(BASE, change(**fields)).scaling == scaling


@pytest.mark.parametrize("fields", [{"min": 3}, {"min": 2, "max": 1}])
def test_bounds_stay_in_order(fields: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidRequest, match=r"expected replicas\.min <= replicas\.max") as refusal:
        change_replicas(BASE, change(**fields))
    assert refusal.value.param == "replicas"


def test_the_bounds_hold_at_once() -> None:
    more = change_replicas(BASE, change(min=3, max=4))
    assert [g.phase for g in more.groups] == [GroupPhase.SERVING, GroupPhase.PENDING, GroupPhase.PENDING]
    assert more.phase is Phase.DEPLOYED
    fewer = change_replicas(more, change(min=1, max=1))
    assert (active(fewer), fewer.groups[0].phase) == (1, GroupPhase.SERVING)


def test_a_sleeping_deployment_is_woken_when_it_may_no_longer_sleep() -> None:
    asleep = replace(BASE, scaling=Scaling(0, 1), groups=())
    awake = change_replicas(asleep, change(min=1))
    assert (active(awake), awake.phase) == (1, Phase.DEPLOYING)
    assert "idle" not in awake.reason
    assert change_replicas(asleep, change(max=2)).groups == ()


def test_a_deployment_that_never_served_keeps_its_first_groups() -> None:
    early = replace(BASE, phase=Phase.PENDING, established=False, groups=(WorkerGroup(0),))
    changed = change_replicas(early, change(min=2))
    assert (changed.groups, changed.phase) == (early.groups, Phase.PENDING)


def test_invalid_replicas_are_refused() -> None:
    with pytest.raises(errors.InvalidRequest, match="its base, 'b'") as refusal:
        change_replicas(deployment("v", Phase.DEPLOYED, "b"), change(max=2))
    assert refusal.value.param == "replicas"
    with pytest.raises(errors.NotReady, match="being undeployed"):
        change_replicas(replace(BASE, phase=Phase.DELETING), change(max=2))


def asked(replicas: Any = None, *present: Deployment) -> list[Deployment]:
    """The deployments that deploying a variant with these replicas writes."""
    options = {} if replicas is None else {"replicas": replicas}
    request = DeployModelRequest.model_validate({"model": "v", **options})
    seen = state(model("b", Phase.READY), model("v", Phase.READY, "b"), *present)
    changes = deploy_model(seen, request, Context("op-1", (1, 2), 0.0)).changes
    return [c.record for c in changes if isinstance(c, Put) and isinstance(c.record, Deployment)]


def test_a_variant_of_a_deployed_base_brings_no_replicas() -> None:
    with pytest.raises(errors.InvalidRequest, match="ostinato tune b") as refusal:
        asked({"min": 3, "max": 3}, BASE)
    assert refusal.value.param == "replicas"
    for as_they_are in (None, {"min": 1, "max": 2, "targetInFlight": 4, "idleS": 60}):
        assert asked(as_they_are, BASE)[-1] == BASE


def test_a_variant_that_brings_its_base_gives_it_its_replicas() -> None:
    (base,) = (d for d in asked({"min": 3, "max": 4}) if d.model == "b")
    assert (base.scaling, len(base.groups)) == (Scaling(3, 4), 3)


def test_a_variant_limit_waits_for_an_engine() -> None:
    asleep = replace(
        BASE,
        scaling=Scaling(0, 1),
        groups=(),
        reason="idle, so no engine runs; the next request starts an engine",
    )
    with pytest.raises(
        errors.NotReady, match="idle, so no engine runs; the next request starts an engine"
    ) as told:
        limit_variants(asleep, 1)
    assert "wait until it is Deployed" not in told.value.message
    slots = replace(PLACED, plan=replace(PLACED.plan, max_variants=4))
    assert limit_variants(deployment("b", Phase.DEPLOYED, placed=slots), 1).max_active_variants == 1


@pytest.mark.parametrize("target", [1e-308, 0.0, -1.0, 1e7])
def test_an_older_target_can_be_shown_and_read_again(target: float) -> None:
    shown = Replicas.of(Scaling(1, 3, target))
    assert Replicas.model_validate(shown.model_dump()) == shown
    with pytest.raises(ValueError, match="targetInFlight"):
        Replicas(targetInFlight=target)
