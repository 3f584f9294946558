"""The devices for placements, from the last report of each node."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.cluster.inventory import NodeContact, Timeouts, inventory_of, node_states, ray_ids
from controlplane.settings import Settings, gpus_of
from placement.types import HolderMemory
from workers.agent.reports import AgentReport, DeviceSample, ProcessMemory
from workers.messages import DeviceReport, NodeReport

GIB = 1 << 30
PATIENCE = Timeouts(stale_s=5, lost_s=30)
RATES = NodeReport("a", (DeviceReport(0, "h200", 4e12, 8e14, "H200"),), "0.32.0")
PROCESSES = (ProcessMemory(1, 2, "m"), ProcessMemory(2, 3, "m"), ProcessMemory(3, 4, None))
SAMPLE = DeviceSample(0, "h200", 140 * GIB, 40 * GIB, (0.0, 0.5, 0.005, 1.0), PROCESSES, nvlink_domain=2)
REPORT = AgentReport(77, (SAMPLE,), 0.1, rates=RATES)
HEARD = NodeContact("a", alive=True, silent_s=0.4, report=REPORT)


def test_a_device_is_as_its_node_reports_it() -> None:
    (node,) = node_states([HEARD], PATIENCE)
    assert (node.problem, node.age_s, node.agent_pid) == ("", 0.4, 77)
    inventory = inventory_of([node])
    (device,) = inventory.devices
    assert (device.total_bytes, device.free_bytes) == (140 * GIB, 100 * GIB)
    assert (device.rates.memory_bytes_per_s, device.model, device.engine) == (4e12, "H200", "0.32.0")
    assert device.load == 0.5  # busy in two of four samples; 0.5% is not busy
    assert device.nvlink_domain == 2
    assert set(device.uses) == {HolderMemory("m", 5), HolderMemory(None, 4)}
    assert inventory.unusable == ()


def test_the_load_of_a_host_is_its_mean_utilisation() -> None:
    host = replace(SAMPLE, kind="cpu", utilisation=(0.2, 0.4))
    rates = NodeReport("a", (DeviceReport(0, "cpu", 1e10, 1e11),))
    (node,) = node_states([replace(HEARD, report=AgentReport(1, (host,), 0.1, rates=rates))], PATIENCE)
    assert node.devices[0].load == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("contact", "reason", "lost"),
    [
        (replace(HEARD, silent_s=7.2), "stale report: the last report of node a was 7.2 s ago", False),
        (
            replace(HEARD, silent_s=7.2, problem="the node's agent did not answer within 5 s"),
            "stale report: the last report of node a was 7.2 s ago: "
            "the node's agent did not answer within 5 s",
            False,
        ),
        (
            replace(HEARD, silent_s=7.2, report=replace(REPORT, problem="NVMLError_GpuIsLost: GPU is lost")),
            "stale report: the last report of node a was 7.2 s ago: NVMLError_GpuIsLost: GPU is lost",
            False,
        ),
        (replace(HEARD, silent_s=31), "node a is lost: its last report was 31.0 s ago", True),
        (replace(HEARD, alive=False), "node a is gone; its last report was 0.4 s ago", True),
        (
            NodeContact("a", True, 3.0, None, "the node has no agent yet"),
            "node a has not reported yet, 3.0 s after it joined: the node has no agent yet",
            False,
        ),
        (
            replace(HEARD, report=replace(REPORT, rates=None)),
            "the devices of node a are being measured",
            False,
        ),
        (replace(HEARD, report=replace(REPORT, devices=())), "node a has no device", False),
    ],
)
def test_why_nothing_new_may_be_placed_on_a_node(contact: NodeContact, reason: str, lost: bool) -> None:
    (node,) = node_states([contact], PATIENCE)
    assert (node.problem, node.lost) == (reason, lost)
    inventory = inventory_of([node])
    assert inventory.devices == ()
    assert [(u.node, u.reason, u.lost) for u in inventory.unusable] == [("a", reason, lost)]


MEASURED = "the devices of a have been measured"
NEW = replace(HEARD, report=replace(REPORT, rates=None))


@pytest.mark.parametrize(
    ("contacts", "awaited"),
    [
        ([NEW], MEASURED),
        ([NodeContact("a", True, 3.0, None, "it has no agent yet")], MEASURED),
        ([HEARD], ""),
        ([replace(HEARD, silent_s=5.1)], "node a reports again"),
        ([replace(HEARD, silent_s=30.0, problem="no answer within 5 s")], "node a reports again"),
        ([replace(HEARD, silent_s=30.1)], ""),
        ([replace(HEARD, silent_s=7.2, alive=False)], ""),
        ([replace(HEARD, silent_s=7.2), replace(HEARD, silent_s=7.2, id="namesake")], ""),
        ([replace(NEW, alive=False)], ""),
        ([replace(NEW, silent_s=31.0)], ""),
        ([replace(NEW, unmeasured="out of memory")], ""),
        ([NEW, replace(NEW, id="namesake")], ""),
        ([replace(HEARD, report=replace(REPORT, devices=()))], ""),
    ],
)
def test_a_node_that_is_measured_or_late_is_awaited(contacts: list[NodeContact], awaited: str) -> None:
    (node,) = node_states(contacts, PATIENCE)
    assert node.awaited == awaited
    assert [u.awaited for u in inventory_of([node]).unusable] == ([] if not node.problem else [awaited])


def test_why_devices_could_not_be_measured() -> None:
    (node,) = node_states([replace(NEW, unmeasured="out of memory")], PATIENCE)
    assert node.problem == "the devices of node a could not be measured yet: out of memory"


def test_a_node_that_came_back_is_not_the_one_that_died() -> None:
    dead = replace(HEARD, alive=False, silent_s=40.0)
    (node,) = node_states([dead, HEARD], PATIENCE)
    assert (node.problem, node.age_s) == ("", 0.4)


def test_ray_decides_which_node_of_a_name_lives() -> None:
    dead = replace(HEARD, alive=False, silent_s=40.0, id="old")
    silent = replace(HEARD, silent_s=40.0, id="old")
    again = replace(HEARD, id="new")
    seen = {
        name: (node.lost, node.gone, node.ids)
        for name, contact in {
            "dead": [dead],
            "silent": [silent],
            "back": [dead, again],
            "both": [silent, again],
        }.items()
        for node in node_states(contact, PATIENCE)
    }
    assert seen == {
        "dead": (True, True, ()),
        "silent": (True, False, ("old",)),
        "back": (False, False, ("new",)),
        "both": (False, False, ("new", "old")),
    }
    assert ray_ids(node_states([dead, again], PATIENCE)) == {"a": "new"}
    assert ray_ids(node_states([silent, again], PATIENCE)) == {}


def test_two_living_nodes_of_one_name_are_refused_with_the_remedy() -> None:
    (node,) = node_states([HEARD, replace(HEARD, silent_s=0.2)], PATIENCE)
    assert node.problem.startswith("2 nodes have the name a")
    assert "--node-name" in node.problem


AGES = st.floats(0, 100)


@given(ages=st.dictionaries(st.sampled_from("abcdef"), AGES))
def test_devices_are_those_of_fresh_reports(ages: dict[str, float]) -> None:
    contact = [replace(HEARD, node=name, silent_s=age) for name, age in ages.items()]
    states = node_states(contact, PATIENCE)
    inventory = inventory_of(states)
    assert {d.node for d in inventory.devices} == {name for name, age in ages.items() if age <= 5}
    assert {u.node: u.lost for u in inventory.unusable} == {n: age > 30 for n, age in ages.items() if age > 5}
    assert [s.name for s in states] == sorted(ages)


# --- which GPUs are ours ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "node", "expected"),
    [
        ("", "a", None),
        ("1,0", "a", (0, 1)),
        ("none", "a", ()),
        ("a=0;b=none;2,3", "a", (0,)),
        ("a=0;b=none;2,3", "b", ()),
        (" a = 0 ; 2 , 3 ", "c", (2, 3)),
        ("a=0", "c", None),
    ],
)
def test_only_granted_gpus_are_ours(text: str, node: str, expected: tuple[int, ...] | None) -> None:
    assert gpus_of(text, node) == expected


@pytest.mark.parametrize("text", ["x", "0-3", "a=", "=1", "a=0;a=1", "0;1", "-1"])
def test_an_unreadable_choice_is_refused_when_settings_are_read(text: str) -> None:
    with pytest.raises(ValueError, match="write it like 0,1 or a=0,1;b=none;2"):
        Settings(gpus=text)
