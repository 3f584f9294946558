"""Placed models influence the next placement: by their expected load and their anti-affinity."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from controlplane import errors
from controlplane.planning.placement_decision import decide, exclude_group
from controlplane.settings import Settings
from controlplane.state.records import Deployment, ExpectedLoad, Model, Phase, PlanConstraints
from controlplane.state.worker_groups import WorkerGroup
from placement.types import CPU, Device, Intent, Inventory, Placement, Scope
from profiler.types import DeviceRates
from testkit.known_models import LLAMA_7B

GIB = 1 << 30
SETTINGS = Settings(home=Path("/nowhere"), max_model_len=2048, concurrency=4)
RATES = DeviceRates(4e12, 5e14)


def gpu(index: int, free_gib: int = 140, node: str = "n") -> Device:
    return Device(node, index, "h200", 140 * GIB, free_gib * GIB, RATES, "h200", "0.26")


def wanted(name: str, **fields: object) -> Deployment:
    made = Deployment(name, 1, name, Phase.PENDING, Intent.MIN_COST, 64)
    return replace(made, **fields)  # type: ignore[arg-type]


def placed(asked: Deployment, *devices: Device, others: tuple[Deployment, ...] = ()) -> Placement:
    model = Model(asked.model, 1, Phase.READY, path="/m", spec=LLAMA_7B)
    return decide(model, asked, Inventory(devices), SETTINGS, others=others)


def where(found: Placement) -> list[tuple[str, int]]:
    return [(rank.node, rank.device_index) for rank in found.ranks]


@pytest.fixture
def busy() -> Deployment:
    """A deployment that is expected to keep GPU 0 busy four fifths of the time, and was asked nothing yet."""
    most = placed(wanted("a"), gpu(0)).choice.throughput_per_s
    asked = wanted("a", load=ExpectedLoad(0.8 * most))
    found = placed(asked, gpu(0))
    (share,) = found.choice.utilisation
    assert share == pytest.approx(0.8)
    return replace(asked, groups=(WorkerGroup(0, placement=found),), phase=Phase.DEPLOYED)


@pytest.mark.parametrize("intent", Intent)
def test_two_that_are_expected_to_be_busy_do_not_share_a_gpu(busy: Deployment, intent: Intent) -> None:
    """GPU 0 is where it fragments least; for a second with as much to do only GPU 1 has the time."""
    second = wanted("b", load=busy.load, intent=intent)
    assert where(placed(second, gpu(0, 100), gpu(1), others=(busy,))) == [("n", 1)]
    with pytest.raises(errors.NoFeasiblePlan) as refusal:
        placed(second, gpu(0, 100), others=(busy,))
    assert refusal.value.details["binding"] == "load.ratePerS"


def test_the_expected_load_of_residents_slows_a_newcomer(busy: Deployment) -> None:
    """1 / (1 - 0.8) times; a record without its utilisation slows no other model."""
    alone, beside = (placed(wanted("b"), gpu(0, 100), others=others) for others in ((), (busy,)))
    assert beside.choice.latency_s == pytest.approx(5 * alone.choice.latency_s)
    assert busy.placement is not None
    silent = replace(busy.placement, choice=replace(busy.placement.choice, utilisation=()))
    old = replace(busy, groups=(WorkerGroup(0, placement=silent),))
    assert placed(wanted("b"), gpu(0, 100), others=(old,)).choice.latency_s == alone.choice.latency_s


def test_a_model_s_own_load_does_not_delay_it(busy: Deployment) -> None:
    assert where(placed(busy, gpu(0), others=tuple(exclude_group([busy], busy.base)))) == [("n", 0)]


def test_the_first_ones_node_stays_its_own_when_the_second_only_asks_for_a_gpu() -> None:
    first = wanted("a", constraints=PlanConstraints(group="g", scope=Scope.NODE))
    first = replace(first, groups=(WorkerGroup(0, placement=placed(first, gpu(0))),))
    second = wanted("b", constraints=PlanConstraints(group="g", scope=Scope.GPU))
    crowded, other = (gpu(0, 100), gpu(1)), gpu(0, 140, "other")
    assert where(placed(second, *crowded, other, others=(first,))) == [("other", 0)]
    with pytest.raises(errors.NoFeasiblePlan) as refusal:
        placed(second, *crowded, others=(first,))
    assert refusal.value.details["binding"] == "antiAffinity"


def test_a_node_is_kept_for_its_deployment_on_devices_of_other_types_too() -> None:
    """The first is on the node's GPU; the second would fit nowhere but on that node's or another's CPU."""
    apart = PlanConstraints(group="g", scope=Scope.NODE)
    first = wanted("a", constraints=apart)
    first = replace(first, groups=(WorkerGroup(0, placement=placed(first, gpu(0))),))
    own, other = (
        Device(node, 0, CPU, size * GIB, size * GIB, DeviceRates(1e11, 1e12))
        for node, size in (("n", 400), ("other", 200))
    )
    second = wanted("b", constraints=apart)
    assert where(placed(second, own, other)) == [("n", 0)]
    assert where(placed(second, gpu(0, 100), own, other, others=(first,))) == [("other", 0)]
