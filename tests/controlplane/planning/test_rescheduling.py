"""When a group is placed again and how soon: on random clusters, against plain definitions."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.cluster.engine_status import EngineStatus, EngineView
from controlplane.cluster.inventory import NodeState
from controlplane.planning import autoscaling, rescheduling
from controlplane.state import deployments
from controlplane.state.records import NodeLedger, Phase, Reservation
from controlplane.state.repository import Versioned
from controlplane.state.worker_groups import (
    GroupPhase,
    WorkerGroup,
    base_of,
    group_id_of,
    next_number,
    number_of,
)
from placement.types import Device, Placement, RankPlacement
from profiler.types import DeviceRates
from testkit.controlplane import builders

RATES = DeviceRates(1e12, 1e14)
NAMES = st.sampled_from("abc")
RUNNING, ILL = EngineView(EngineStatus.RUNNING), EngineView(EngineStatus.UNHEALTHY)

Fault = tuple[str, str, int]  # what happened to device `index` of a node


def device(node: str, index: int, total: int = 100) -> Device:
    return Device(node, index, "h200", total, total, RATES)


def placement(*seats: tuple[str, int, int]) -> Placement:
    """Ranks by node, GPU and bytes."""
    ranks = tuple(
        RankPlacement(n, n, 0, node, index, "h200", n, n + 1, size)
        for n, (node, index, size) in enumerate(seats)
    )
    return replace(builders.PLACED, ranks=ranks)


def on(*seats: tuple[str, int, int]) -> WorkerGroup:
    """A group that serves on these, launched when every node had its first id."""
    return WorkerGroup(0, GroupPhase.SERVING, placement(*seats), node_ids={n: f"{n}-1" for n in "abc"})


def cluster(faults: list[Fault]) -> tuple[NodeState, ...]:
    """Nodes a to c with two GPUs of 100 bytes each, after these faults."""
    nodes = {n: NodeState(n, (device(n, 0), device(n, 1)), 0.5, ids=(f"{n}-1",)) for n in "abc"}
    for what, name, index in faults:
        node = nodes.get(name)
        if node is None:
            continue
        match what:
            case "leaves":
                del nodes[name]
            case "dies":
                problem = f"node {name} is gone"
                nodes[name] = replace(node, devices=(), problem=problem, lost=True, gone=True, ids=())
            case "silent":
                nodes[name] = replace(node, devices=(), problem=f"node {name} is lost", lost=True)
            case "restarts":
                nodes[name] = replace(node, ids=(f"{name}-2",))
            case "comes back":  # while Ray still takes the old one to live
                nodes[name] = replace(node, ids=(f"{name}-1", f"{name}-2"), problem="2 nodes have")
            case "late":
                nodes[name] = replace(node, devices=(), problem="stale report")
            case "loses":
                nodes[name] = replace(node, devices=tuple(d for d in node.devices if d.index != index))
            case "shrinks":
                smaller = (replace(d, total_bytes=50) if d.index == index else d for d in node.devices)
                nodes[name] = replace(node, devices=tuple(smaller))
    return tuple(nodes.values())


FAULTS = st.lists(
    st.tuples(
        st.sampled_from(["leaves", "dies", "silent", "restarts", "comes back", "late", "loses", "shrinks"]),
        NAMES,
        st.integers(0, 1),
    ),
    max_size=4,
)
SEATS = st.lists(st.tuples(NAMES, st.integers(0, 1), st.sampled_from([20, 40, 60])), min_size=1, max_size=4)


ENGINES = st.sampled_from([RUNNING, ILL, EngineView(EngineStatus.STARTING), None])


@given(seats=SEATS, faults=FAULTS, engine=ENGINES)
def test_a_group_moves_exactly_if_something_it_needs_is_gone(
    seats: list[tuple[str, int, int]], faults: list[Fault], engine: EngineView | None
) -> None:
    nodes = cluster(faults)
    if not nodes:  # nothing was heard: nothing is known
        assert not rescheduling.replacement_reason(on(*seats), engine, nodes)
        return
    by_name = {node.name: node for node in nodes}

    def stands(node: str, index: int) -> bool:
        found = by_name.get(node)
        if found is None or found.gone or f"{node}-1" not in found.ids:
            return False
        if found.lost:  # by its agent's silence alone
            return engine not in (ILL, None)
        if found.problem:  # it may come back
            return True
        room = {d.index: d.total_bytes for d in found.devices}.get(index, 0)
        return room >= sum(size for n, i, size in seats if (n, i) == (node, index))

    troubled = bool(rescheduling.replacement_reason(on(*seats), engine, nodes))
    assert troubled == (not all(stands(node, index) for node, index, _ in seats))


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        (
            EngineView(EngineStatus.FAILED, "Traceback:\n  x\nRuntimeError: no\n\n"),
            "the engine failed: RuntimeError: no",
        ),
        (EngineView(EngineStatus.FAILED), "the engine failed: no reason given"),
        (EngineView(EngineStatus.UNHEALTHY, "ill"), ""),  # Serve restarts it
        (EngineView(EngineStatus.STARTING), ""),
        (None, ""),
    ],
)
def test_serve_s_status_becomes_the_reason(view: EngineView | None, reason: str) -> None:
    assert rescheduling.replacement_reason(on(("a", 0, 1)), view, cluster([])) == reason
    assert rescheduling.replacement_reason(WorkerGroup(0), view, cluster([])) == ""


def test_silence_of_an_agent_alone_stops_no_engine_that_runs() -> None:
    silent = cluster([("silent", "a", 0)])
    assert rescheduling.replacement_reason(on(("a", 0, 1)), RUNNING, silent) == ""
    for view in (ILL, EngineView(EngineStatus.FAILED), None):
        assert rescheduling.replacement_reason(on(("a", 0, 1)), view, silent) == "node a is lost"
    dead = cluster([("dies", "a", 0)])
    assert rescheduling.replacement_reason(on(("a", 0, 1)), RUNNING, dead) == "node a is gone"


def test_a_node_that_was_restarted_under_its_name_has_nothing_of_what_ran_there() -> None:
    """Serve's replica is pinned to Ray's old id, and waits for it for ever."""
    again = cluster([("restarts", "a", 0)])
    assert rescheduling.replacement_reason(on(("a", 0, 1)), RUNNING, again) == "node a was restarted"
    older = replace(on(("a", 0, 1)), node_ids={})  # a record from before ids were kept
    assert rescheduling.replacement_reason(older, RUNNING, again) == ""


def test_an_engine_that_does_not_start_in_time_failed() -> None:
    begun = replace(on(("a", 0, 1)), phase=GroupPhase.STARTING, since_s=100.0)
    deployment = replace(builders.deployment("b", Phase.DEPLOYING), groups=(begun, replace(begun, number=1)))
    starting = EngineView(EngineStatus.STARTING)
    engines = {"b": starting, "b@1": RUNNING, "x": starting}
    assert rescheduling.mark_start_timeouts(engines, [deployment], 160.0, 60.0) == engines
    found = rescheduling.mark_start_timeouts(engines, [deployment], 160.1, 60.0)
    assert found == engines | {"b": EngineView(EngineStatus.FAILED, "the engine did not start within 60 s")}
    serving = replace(deployment, groups=(replace(begun, phase=GroupPhase.SERVING),))
    assert rescheduling.mark_start_timeouts(engines, [serving], 1e6, 60.0) == engines


def test_a_group_remembers_on_which_kind_of_device_it_was() -> None:
    group = on(("a", 0, 1))
    assert group.kind == ""  # as in an older record
    waits = rescheduling.refused(rescheduling.unplaced(group, "its node died", 1.0), "memory", "k", 2.0)
    assert (waits.placement, waits.kind) == (None, "h200")
    asleep = deployments.without_group(replace(builders.deployment("b", Phase.DEPLOYED), groups=(group,)), 0)
    assert (asleep.groups, asleep.device_kind) == ((), "h200")
    (woken,) = autoscaling.resized(asleep, 1).groups
    assert woken.device_kind == "h200"


def test_delays_grow_and_are_bounded() -> None:
    delays = [rescheduling.delay_s(n) for n in range(2000)]
    assert delays[:4] == [0.0, 0.0, 2.0, 4.0]
    assert all(a <= b for a, b in pairwise(delays))
    assert delays[-1] == rescheduling.MAX_DELAY_S


@given(lives=st.lists(st.floats(0, 2000), min_size=1, max_size=30))
def test_a_group_that_keeps_failing_is_tried_ever_more_seldom(lives: list[float]) -> None:
    """`lives`: seconds that it serves each time. After STEADY_S it starts afresh."""
    group, now_s, in_a_row = WorkerGroup(0), 0.0, 0
    for life_s in lives:
        serving = replace(group, phase=GroupPhase.SERVING, placement=builders.PLACED, since_s=now_s)
        before_s, now_s = now_s, now_s + life_s
        in_a_row = 1 if now_s - before_s >= rescheduling.STEADY_S else in_a_row + 1
        group = rescheduling.unplaced(serving, "it failed", now_s)
        assert group.placement is None
        wait_s = 0.0 if in_a_row == 1 else min(60.0, 2.0 * 2 ** (in_a_row - 2))
        assert group.retry_at_s == now_s + wait_s
        assert rescheduling.due(group, "k", group.retry_at_s)
        assert not wait_s or not rescheduling.due(group, "another", group.retry_at_s - 0.1)
        now_s = group.retry_at_s


def test_a_refused_group_waits_for_another_cluster_or_a_while() -> None:
    waits = rescheduling.refused(WorkerGroup(2, failures=3), "memory", "k", 100.0)
    assert not rescheduling.due(waits, "k", 100.0)
    assert rescheduling.due(waits, "other", 100.0)
    assert rescheduling.due(waits, "k", 100.0 + rescheduling.NO_ROOM_S)
    assert (waits.failures, waits.reason) == (3, "memory")


def test_a_change_of_devices_or_promises_changes_the_cluster_key() -> None:
    nodes = cluster([])
    mine = NodeLedger("a", (Reservation("b@1", 1, 0, "h200", 0, 10, 0.0),))
    ledgers = {"a": Versioned(mine, 1)}
    key = rescheduling.cluster_key(nodes, ledgers)
    used = tuple(
        replace(n, age_s=3.0, devices=tuple(replace(d, free_bytes=1) for d in n.devices)) for n in nodes
    )
    assert rescheduling.cluster_key(used[::-1], ledgers) == key
    assert rescheduling.cluster_key(nodes, {}) != key
    assert rescheduling.cluster_key(nodes, {}) == rescheduling.cluster_key(nodes, ledgers, exclude="b@1")
    for what in ("leaves", "dies", "silent", "late", "loses", "shrinks"):
        assert rescheduling.cluster_key(cluster([(what, "a", 0)]), ledgers) != key


PHASES = st.lists(st.sampled_from(GroupPhase), min_size=1, max_size=5)


@given(phases=PHASES, established=st.booleans())
def test_a_deployment_stands_as_its_groups_do(phases: list[GroupPhase], established: bool) -> None:
    groups = tuple(WorkerGroup(n, phase, reason=f"why {n}") for n, phase in enumerate(phases))
    first = builders.deployment("b", Phase.DEPLOYING)
    found = deployments.with_derived_phase(replace(first, groups=groups, established=established))
    serving = phases.count(GroupPhase.SERVING)
    assert found.phase is (Phase.DEPLOYED if serving else Phase.DEPLOYING)
    away = [n for n, p in enumerate(phases) if p in (GroupPhase.PENDING, GroupPhase.STARTING)]
    assert all((f"why {n}" in found.reason) == (n in away) for n in range(len(phases)))
    assert (f"{serving} of {len(phases)} groups answer" in found.reason) == bool(
        away and serving and established
    )


@given(base=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,94}", fullmatch=True), number=st.integers(0, 99))
def test_names_of_groups(base: str, number: int) -> None:
    name = group_id_of(base, number)
    assert (base_of(name), number_of(name)) == (base, number)
    assert (name == base) == (number == 0)  # as one engine of a base was always called


def test_numbers_of_groups_are_their_own() -> None:
    assert next_number(()) == 0
    assert next_number((WorkerGroup(4), WorkerGroup(1))) == 5
