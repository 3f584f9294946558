"""The request of a deployment decides its place; an impossible one is refused by name and number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from controlplane import errors
from controlplane.api.operations import failure_of
from controlplane.planning.placement_decision import decide, exclude_group
from controlplane.settings import Settings
from controlplane.state.records import (
    AutoRelax,
    Deployment,
    ExpectedLoad,
    Model,
    OperationKind,
    Phase,
    PlanConstraints,
)
from controlplane.state.worker_groups import WorkerGroup
from placement.types import (
    Constraint,
    CostMeasure,
    Device,
    EngineSizes,
    Intent,
    Inventory,
    Scope,
    Slos,
    Unusable,
)
from profiler.types import DeviceRates
from testkit.controlplane import builders
from testkit.controlplane.builders import ready_base
from testkit.in_memory import CPU, GIB

GPU = Device("g", 0, "b300", 100 * GIB, 90 * GIB, DeviceRates(8e12, 2e15), "b300", "0.26")
WANTED = Deployment("b", 1, "b", Phase.PENDING, Intent.MIN_COST, 16)
HERE = Inventory((CPU,))


@pytest.fixture
def base(files: Path) -> Model:
    return replace(ready_base(files), compression={"none": 97.0})


def refused(
    base: Model, settings: Settings, inventory: Inventory = HERE, **wanted: object
) -> errors.NoFeasiblePlan:
    with pytest.raises(errors.NoFeasiblePlan) as refusal:
        decide(base, replace(WANTED, **wanted), inventory, settings)  # type: ignore[arg-type]
    return refusal.value


def test_an_unmet_limit_is_answered_with_the_best_value_in_its_unit(base: Model, settings: Settings) -> None:
    error = refused(base, settings, slos=Slos(tpot_s=1e-9))
    assert error.details["binding"] == "SLOs.tpot_ms"
    assert error.details["together"] is False
    (one,) = error.details["relaxations"]
    assert (one["constraint"], one["asked"]) == ("SLOs.tpot_ms", pytest.approx(1e-6))
    assert one["factor"] == pytest.approx(one["offered"] / 1e-6, rel=1e-3)
    assert one["text"] in error.message
    met = decide(base, replace(WANTED, slos=Slos(tpot_s=one["offered"] / 1000)), HERE, settings)
    assert met.estimate.tpot_s <= one["offered"] / 1000


def test_the_nearest_is_applied_where_the_user_allowed_it(base: Model, settings: Settings) -> None:
    wanted = replace(WANTED, slos=Slos(latency_s=1e-9), auto_relax=AutoRelax(True))
    placed = decide(base, wanted, HERE, settings)
    (one,) = placed.choice.relaxed
    assert (one.constraint, one.asked) == (Constraint.LATENCY, 1e-9)
    assert placed.choice.latency_s <= one.offered * 1.001
    assert f"relaxed, as allowed: {one.text}" in placed.reason


def test_no_further_than_the_user_allowed(base: Model, settings: Settings) -> None:
    error = refused(base, settings, slos=Slos(latency_s=1e-9), auto_relax=AutoRelax(True, 2.0))
    assert "more than the allowed 2 times" in error.message
    assert error.details["relaxations"]


def test_one_limit_among_several_is_named(base: Model, settings: Settings) -> None:
    error = refused(base, settings, slos=Slos(latency_s=100.0, accuracy=99.0))
    assert "97" not in error.details  # the one quantization there is has 97%: none comes nearer by less
    assert error.details["binding"] == "SLOs.accuracy"
    assert error.details["relaxations"][0]["offered"] == 97.0


def test_limits_that_fail_together_are_all_named(base: Model, settings: Settings) -> None:
    error = refused(base, settings, slos=Slos(latency_s=1e-9, accuracy=99.0))
    assert error.details["together"] is True
    assert {one["constraint"] for one in error.details["relaxations"]} == {"SLOs.e2e_ms", "SLOs.accuracy"}
    wanted = replace(WANTED, slos=Slos(latency_s=1e-9, accuracy=99.0), auto_relax=AutoRelax(True))
    assert len(decide(base, wanted, HERE, settings).choice.relaxed) == 2


def test_a_rate_that_one_engine_cannot_keep_up_with(base: Model, settings: Settings) -> None:
    error = refused(base, settings, load=ExpectedLoad(1e6))
    assert error.details["binding"] == "load.ratePerS"
    offered = error.details["relaxations"][0]["offered"]
    placed = decide(base, replace(WANTED, load=ExpectedLoad(offered)), HERE, settings)
    assert placed.choice.throughput_per_s >= offered > 0
    assert 0.9 < max(placed.choice.utilisation) <= 1
    assert error.details["relaxations"][0]["factor"] == pytest.approx(1e6 / offered)


def test_a_cache_for_which_there_is_no_room_is_offered_smaller(base: Model, settings: Settings) -> None:
    asked = EngineSizes(requests_at_once=16, variant_slots=1)  # else there is room for fewer of both
    wanted = replace(WANTED, engine=asked)
    full = decide(base, wanted, HERE, settings)
    need = sum(full.estimate.memory_bytes)
    tight = Inventory((replace(CPU, free_bytes=need - 1),))
    error = refused(base, settings, tight, engine=asked)
    assert error.details["binding"] == "memory"
    assert "GiB" in error.message
    offered = error.details["relaxations"][0]["offered"]
    assert offered == 15
    eased = decide(base, replace(wanted, auto_relax=AutoRelax(True)), tight, settings)
    assert eased.plan.kv_cache_tokens == offered * eased.plan.max_model_len
    assert sum(eased.estimate.memory_bytes) < need


def test_lengths_beyond_the_context_are_refused(base: Model, settings: Settings) -> None:
    error = refused(base, settings, load=ExpectedLoad(0.0, 60, 10))
    assert error.details["binding"] == "load"
    assert (error.details["relaxations"][0]["asked"], error.details["relaxations"][0]["offered"]) == (70, 64)


def test_a_refusal_without_devices_says_why_nodes_are_not_used(base: Model, settings: Settings) -> None:
    error = refused(base, settings, Inventory((), (Unusable("n", "stale report: n is silent"),)))
    assert "stale report: n is silent" in error.message
    assert error.details["relaxations"] == []


def test_a_refusal_names_unused_nodes_next_to_used_devices(base: Model, settings: Settings) -> None:
    """The one that is silent may be the one with room."""
    silent = Unusable("n", "stale report: the last report of node n was 7.2 s ago")
    tight = replace(HERE, devices=(replace(CPU, free_bytes=1000),), unusable=(silent,))
    error = refused(base, settings, tight)
    assert error.message.endswith(f"excluded devices: {silent.reason}")
    assert error.details["unusable"] == [{"node": "n", "reason": silent.reason}]
    assert refused(base, settings, Inventory((), (silent,))).details["unusable"] == error.details["unusable"]
    all_there = refused(base, settings, Inventory(tight.devices))
    assert all_there.details["unusable"] == []
    assert f"{all_there.message}; excluded devices: {silent.reason}" == error.message


def test_a_model_with_only_unserved_techniques_is_refused(base: Model, settings: Settings) -> None:
    error = refused(replace(base, compression={"int4": 90.0}), settings)
    assert error.details == {
        "binding": "compressionTechnique",
        "relaxations": [],
        "together": False,
        "unusable": [],
    }


def test_a_client_that_waits_for_an_operation_gets_the_details_too(base: Model, settings: Settings) -> None:
    error = refused(base, settings, slos=Slos(tpot_s=1e-9))
    ended = builders.operation(OperationKind.DEPLOY, "b", phase=Phase.FAILED, error=error.body())
    raised = failure_of(ended)
    assert type(raised) is errors.NoFeasiblePlan
    assert raised.body() == error.body()
    assert raised.details


# --- devices --------------------------------------------------------------------------------------


def test_a_gpu_of_an_unknown_type_comes_before_a_cpu(base: Model, settings: Settings) -> None:
    placed = decide(base, WANTED, Inventory((CPU, GPU)), settings)
    assert [(r.node, r.device_kind) for r in placed.ranks] == [("g", "b300")]
    full = Inventory((CPU, replace(GPU, free_bytes=0)))
    assert decide(base, WANTED, full, settings).ranks[0].device_kind == "cpu"


def test_the_type_of_gpu_that_serves_the_intent_is_chosen(base: Model, settings: Settings) -> None:
    slow = replace(GPU, node="s", kind="l4", model="l4", rates=DeviceRates(3e11, 1e14))
    quick = decide(base, replace(WANTED, intent=Intent.MIN_LATENCY), Inventory((slow, GPU)), settings)
    assert quick.ranks[0].device_kind == "b300"
    full = Inventory((slow, replace(GPU, free_bytes=0)))
    assert decide(base, replace(WANTED, intent=Intent.MIN_LATENCY), full, settings).ranks[0].node == "s"
    error = refused(base, settings, Inventory((slow, GPU)), slos=Slos(tpot_s=1e-9))
    alone = refused(base, settings, Inventory((GPU,)), slos=Slos(tpot_s=1e-9))
    assert error.details == alone.details  # the quicker type comes nearer
    eased = decide(
        base,
        replace(WANTED, slos=Slos(tpot_s=1e-9), auto_relax=AutoRelax(True)),
        Inventory((slow, GPU)),
        settings,
    )
    assert eased.ranks[0].device_kind == "b300"


def test_ranks_that_are_asked_for_share_a_cpu(base: Model, settings: Settings) -> None:
    wanted = replace(WANTED, constraints=PlanConstraints(layers_per_stage=(1, 1)))
    placed = decide(base, wanted, HERE, settings)
    assert [(r.stage, r.layer_start, r.layer_end, r.device_index) for r in placed.ranks] == [
        (0, 0, 1, 0),
        (1, 1, 2, 0),
    ]
    assert sum(r.memory_bytes for r in placed.ranks) <= CPU.free_bytes


def test_anti_affinity_keeps_apart_from_what_is_placed_and_not_from_itself(
    base: Model, settings: Settings
) -> None:
    two = Inventory((CPU, replace(CPU, node="other", free_bytes=CPU.free_bytes - GIB)))
    wanted = replace(WANTED, constraints=PlanConstraints(group="g", scope=Scope.NODE))
    first = decide(base, wanted, two, settings)
    assert first.ranks[0].node == "node"
    mine = replace(wanted, groups=(WorkerGroup(0, placement=first),))
    theirs = replace(mine, model="c", base="c")
    again = exclude_group([mine, theirs], mine.base)
    assert [one.placement for one in again] == [None, first]
    assert decide(base, wanted, two, settings, others=again[:1]).ranks[0].node == "node"
    assert decide(base, wanted, two, settings, others=[mine]).ranks[0].node == "other"  # another replica
    assert decide(base, wanted, two, settings, others=[theirs]).ranks[0].node == "other"
    with pytest.raises(errors.NoFeasiblePlan) as refusal:
        decide(base, replace(wanted, auto_relax=AutoRelax(True)), HERE, settings, others=[theirs])
    assert refusal.value.details["binding"] == "antiAffinity"


# --- intents --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("intent", "measure", "unit"),
    [
        (Intent.MIN_COST, CostMeasure.MEMORY_LATENCY, "GiB s"),
        (Intent.MIN_COST, CostMeasure.MEMORY, "GiB"),
        (Intent.MIN_COST, CostMeasure.GPU_HOURS, "GPU h"),
        (Intent.MIN_LATENCY, CostMeasure.MEMORY, "s"),
        (Intent.MIN_MEMORY, CostMeasure.GPU_HOURS, "GiB"),
        (Intent.MIN_GPU_HOURS, CostMeasure.MEMORY, "GPU h"),
    ],
)
def test_each_intent_minimises_its_objective(
    base: Model, settings: Settings, intent: Intent, measure: CostMeasure, unit: str
) -> None:
    known = settings.model_copy(update={"cost_measure": measure})
    placed = decide(base, replace(WANTED, intent=intent), HERE, known)
    memory, latency_s = sum(placed.estimate.memory_bytes) / GIB, placed.choice.latency_s
    values = {"GiB s": memory * latency_s, "GiB": memory, "s": latency_s, "GPU h": latency_s / 3600}
    assert placed.choice.unit == unit
    assert placed.choice.objective == pytest.approx(values[unit])
    assert f"{placed.choice.objective:.4g} {unit}" in placed.reason
