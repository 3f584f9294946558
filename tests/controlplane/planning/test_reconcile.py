"""Situations and what is to be done about them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.cluster.engine_status import EngineStatus, EngineView
from controlplane.cluster.inventory import NodeState
from controlplane.planning.reconcile import (
    KEEP_KEYS_S,
    KEEP_OPERATIONS,
    SEE_KEYS_EACH_S,
    Cancel,
    ConfirmServing,
    Drain,
    FailDeployment,
    Forget,
    ForgetKeys,
    Launch,
    LoadVariant,
    Observed,
    ReadModel,
    Release,
    Replan,
    StopGroup,
    Undeploy,
    UnloadVariant,
    expired,
    old_operations,
    reconcile,
)
from controlplane.state.operations import open_operation
from controlplane.state.records import (
    KINDS,
    IdempotencyKey,
    ModelProfile,
    NodeLedger,
    OperationKind,
    Phase,
    Reservation,
    key_of,
)
from controlplane.state.worker_groups import GroupPhase, WorkerGroup
from placement.types import RankPlacement
from testkit.controlplane.builders import PLACED, deployment, model, operation, state

RUNNING, STARTING = EngineView(EngineStatus.RUNNING), EngineView(EngineStatus.STARTING)
FAILED, LEAVING = EngineView(EngineStatus.FAILED), EngineView(EngineStatus.DELETING)
ILL = EngineView(EngineStatus.UNHEALTHY)


NODES = (NodeState("n", (), 0.5), NodeState("lost", (), 99.0, "node lost is gone", lost=True))
ON_LOST = replace(PLACED, ranks=(RankPlacement(0, 0, 0, "lost", 0, "cpu", 0, 2, 1),))
BASE_UP = replace(deployment("b", Phase.DEPLOYED), established=True)
PROMISE = Reservation("b", BASE_UP.uid, 0, "cpu", 0, 1, 0.0)
DEPLOY, REGISTER = OperationKind.DEPLOY, OperationKind.REGISTER

SITUATIONS: list[tuple[str, tuple[Any, ...], dict[str, EngineView], tuple[Any, ...]]] = [
    ("nothing", (), {}, ()),
    ("a new model", (model("b", Phase.PENDING),), {}, (ReadModel("b"),)),
    ("profiling was interrupted", (model("b", Phase.PROFILING),), {}, (ReadModel("b"),)),
    ("a ready model", (model("b", Phase.READY),), {}, ()),
    (
        "a cancelled registration",
        (model("b", Phase.PENDING), operation(REGISTER, "b", cancel_requested=True)),
        {},
        (Cancel("op-1"),),
    ),
    ("a new deployment", (deployment("b", Phase.PENDING, placed=None),), {}, (Launch("b"),)),
    ("killed before the launch", (deployment("b", Phase.DEPLOYING),), {}, (Launch("b"),)),
    ("an engine that starts", (deployment("b", Phase.DEPLOYING),), {"b": STARTING}, ()),
    ("an engine that runs", (deployment("b", Phase.DEPLOYING),), {"b": RUNNING}, (ConfirmServing("b"),)),
    ("an engine that failed", (deployment("b", Phase.DEPLOYING),), {"b": FAILED}, (FailDeployment("b"),)),
    ("all is well", (BASE_UP,), {"b": RUNNING}, ()),
    ("an ill engine is Serve's to restart", (BASE_UP,), {"b": ILL}, ()),
    ("the cluster restarted", (BASE_UP,), {}, (Launch("b"),)),
    ("an engine that leaves is waited for", (deployment("b", Phase.PENDING),), {"b": LEAVING}, ()),
    (
        "an earlier deployment's engine",
        (deployment("b", Phase.PENDING, placed=None),),
        {"b": RUNNING},
        (StopGroup("b"),),
    ),
    ("an undeployment", (deployment("b", Phase.DELETING),), {"b": RUNNING}, (Undeploy("b"),)),
    ("an undeployment half done", (deployment("b", Phase.DELETING),), {}, (Undeploy("b"),)),
    (
        "a cancelled deployment",
        (deployment("b", Phase.DEPLOYING), operation(DEPLOY, "b", cancel_requested=True)),
        {"b": RUNNING},
        (Cancel("op-1"),),
    ),
    ("an engine nobody wants", (), {"b": RUNNING}, (StopGroup("b"),)),
    ("an engine nobody wants, leaving", (), {"b": LEAVING}, ()),
    (
        "a variant whose base starts",
        (deployment("b", Phase.DEPLOYING), deployment("v", Phase.PENDING, "b")),
        {"b": STARTING},
        (),
    ),
    (
        "a variant whose base serves",
        (BASE_UP, deployment("v", Phase.PENDING, "b")),
        {"b": RUNNING},
        (LoadVariant("v"),),
    ),
    ("a served variant", (BASE_UP, deployment("v", Phase.DEPLOYED, "b")), {"b": RUNNING}, ()),
    (
        "a variant that leaves",
        (BASE_UP, deployment("v", Phase.DELETING, "b")),
        {"b": RUNNING},
        (UnloadVariant("v"),),
    ),
    (
        "memory promised to who is gone",
        (BASE_UP, NodeLedger("n", (replace(PROMISE, uid=9), replace(PROMISE, holder="x", uid=1)))),
        {"b": RUNNING},
        (Release("b"), Release("x")),
    ),
    ("memory promised", (BASE_UP, NodeLedger("n", (PROMISE,))), {"b": RUNNING}, ()),
    (
        "a node is lost",
        (deployment("b", Phase.DEPLOYED, placed=ON_LOST),),
        {"b": ILL},
        (Replan("b"),),
    ),
    (
        "a node is lost while its engine starts for the first time",
        (deployment("b", Phase.DEPLOYING, placed=ON_LOST),),
        {"b": FAILED},
        (Replan("b"),),
    ),
    (
        "the agent of a node where an engine runs is silent",
        (replace(deployment("b", Phase.DEPLOYED, placed=ON_LOST), established=True),),
        {"b": RUNNING},
        (),
    ),
    ("an established engine failed", (BASE_UP,), {"b": FAILED}, (Replan("b"),)),
    (
        "one of two groups is gone",
        (replace(BASE_UP, groups=(*BASE_UP.groups, replace(BASE_UP.groups[0], number=1))),),
        {"b": RUNNING},
        (Launch("b@1"),),
    ),
    (
        "one of two groups could not start",
        (replace(BASE_UP, groups=(*BASE_UP.groups, WorkerGroup(1, GroupPhase.STARTING, PLACED))),),
        {"b": RUNNING, "b@1": FAILED},
        (Replan("b@1"),),
    ),
    (
        "a group waits for its next attempt",
        (replace(BASE_UP, groups=(*BASE_UP.groups, WorkerGroup(1, retry_at_s=5.0))),),
        {"b": RUNNING},
        (),
    ),
    (
        "a group that leaves",
        (replace(BASE_UP, groups=(*BASE_UP.groups, WorkerGroup(1, GroupPhase.DRAINING, PLACED))),),
        {"b": RUNNING, "b@1": RUNNING},
        (Drain("b@1"),),
    ),
    ("the engine of a group that is no more", (BASE_UP,), {"b": RUNNING, "b@7": ILL}, (StopGroup("b@7"),)),
    ("a variant without base", (deployment("v", Phase.PENDING, "b"),), {}, (FailDeployment("v"),)),
]


@pytest.mark.parametrize(
    ("records", "engines", "actions"), [s[1:] for s in SITUATIONS], ids=[s[0] for s in SITUATIONS]
)
def test_each_situation_has_its_action(
    records: tuple[Any, ...], engines: dict[str, EngineView], actions: Any
) -> None:
    assert reconcile(state(*records), Observed(engines, frozenset(), 0.0, NODES)) == actions


def test_a_stranger_is_not_stopped_while_its_launch_runs() -> None:
    observed = Observed({"b": RUNNING}, frozenset({"Launch:b"}), 0.0)
    assert reconcile(state(deployment("b", Phase.PENDING, placed=None)), observed) == ()
    assert reconcile(state(), observed) == ()


def test_an_engine_that_is_stopped_for_a_new_place_is_not_stopped_twice() -> None:
    moving = state(deployment("b", Phase.DEPLOYING, placed=None))
    assert reconcile(moving, Observed({"b": ILL}, frozenset({"Replan:b"}), 0.0)) == ()
    assert reconcile(moving, Observed({"b": ILL}, frozenset(), 0.0)) == (StopGroup("b"),)


def test_a_failed_deployment_is_not_launched_while_it_is_removed() -> None:
    """Its engine is stopped before its record is gone."""
    failing = state(deployment("b", Phase.DEPLOYING))
    assert reconcile(failing, Observed({}, frozenset({"FailDeployment:b"}), 0.0)) == ()
    assert reconcile(failing, Observed({}, frozenset(), 0.0)) == (Launch("b"),)


def test_old_operations_are_forgotten() -> None:
    done = [
        replace(operation(DEPLOY, "b", phase=Phase.DEPLOYED), id=f"op-{n:05}", updated_at_s=float(n))
        for n in range(KEEP_OPERATIONS + 2)
    ]
    assert reconcile(state(*done), Observed({}, frozenset(), 0.0)) == (Forget("old operations"),)
    assert old_operations(state(*done)) == ["op-00000", "op-00001"]
    assert old_operations(state(*done[2:])) == []


def test_keys_are_seen_through_each_hour() -> None:
    seen = Observed({}, frozenset(), SEE_KEYS_EACH_S + 10.0, keys_seen_s=10.0)
    assert reconcile(state(), seen) == ()
    assert reconcile(state(), replace(seen, now_s=seen.now_s + 1)) == (ForgetKeys("old keys"),)


def test_a_key_and_how_an_operation_ended_are_kept_for_a_day() -> None:
    key = IdempotencyKey("key", "", "op", 5.0)
    ended = operation(DEPLOY, "b", phase=Phase.DEPLOYED, created_at_s=5.0)
    assert [expired(record, KEEP_KEYS_S + 6.0) for record in (key, ended)] == [True, True]
    assert [expired(record, KEEP_KEYS_S + 5.0) for record in (key, ended)] == [False, False]


def test_the_oldest_open_operation_is_meant() -> None:
    ops = [
        replace(operation(DEPLOY, "b"), id="late", created_at_s=2.0),
        replace(operation(DEPLOY, "b"), id="early", created_at_s=1.0),
        replace(operation(DEPLOY, "b", phase=Phase.FAILED), id="done"),
    ]
    found = open_operation(state(*ops), DEPLOY, "b")
    assert found is not None
    assert found.id == "early"


NAMES = st.sampled_from(["a", "b", "v"])
RECORDS = st.one_of(
    st.builds(model, NAMES, st.sampled_from(Phase)),
    st.builds(deployment, NAMES, st.sampled_from(Phase), st.none() | NAMES, st.sampled_from([None, PLACED])),
    st.builds(
        lambda n, kind, target, phase, cancel: replace(
            operation(kind, target, phase=phase, cancel_requested=cancel), id=f"op-{n}"
        ),
        st.integers(0, 5),
        st.sampled_from(OperationKind),
        NAMES,
        st.sampled_from(Phase),
        st.booleans(),
    ),
)
KEPT_IN_RECORDS = st.one_of(
    st.builds(model, NAMES, st.sampled_from(Phase)),
    st.builds(deployment, NAMES, st.sampled_from(Phase), st.none() | NAMES, st.sampled_from([None, PLACED])),
    st.builds(
        ModelProfile,
        NAMES,
        *map(st.just, ("llama", "float32", "cpu", "0")),
        st.sampled_from([Phase.PROFILING, Phase.READY]),
    ),
    st.builds(
        lambda holders: NodeLedger("n", tuple(Reservation(h, 1, 0, "cpu", 0, 1, 0.0) for h in holders)),
        st.lists(st.sampled_from(["a", "b", "b@1", "measuring:a", "compressing:v"]), unique=True),
    ),
)
ENGINES = st.dictionaries(NAMES, st.builds(EngineView, st.sampled_from(EngineStatus)))


@given(st.lists(RECORDS, max_size=8), ENGINES, st.data())
def test_keys_are_unique_and_busy_ones_left_alone(
    records: list[Any], engines: dict[str, EngineView], data: st.DataObject
) -> None:
    everything = state(*records)
    actions = reconcile(everything, Observed(engines, frozenset(), 0.0))
    keys = [a.key for a in actions]
    assert len(keys) == len(set(keys))
    busy = frozenset(data.draw(st.lists(st.sampled_from(keys)))) if keys else frozenset()
    still = {a.key for a in reconcile(everything, Observed(engines, busy, 0.0))}
    assert not still & busy
    assert still <= set(keys)


@given(st.lists(KEPT_IN_RECORDS, min_size=1, max_size=8), ENGINES, st.data())
def test_an_unreadable_record_triggers_no_action(
    records: list[Any], engines: dict[str, EngineView], data: st.DataObject
) -> None:
    """A readable record that asks for it, or a record that seems to be gone, does not count."""
    distinct = list({(type(r), key_of(r)): r for r in records}.values())
    hidden = data.draw(st.sampled_from(distinct))
    name = f"{KINDS[type(hidden)]}/{key_of(hidden)}"
    left = replace(state(*(r for r in distinct if r is not hidden)), undecodable=(name,))
    observed = Observed(engines, frozenset(), 0.0, NODES)
    assert set(reconcile(left, observed)) <= set(reconcile(state(*distinct), observed))


def test_no_memory_is_promised_while_reservations_are_unreadable() -> None:
    waiting = state(deployment("b", Phase.PENDING, placed=None), model("x", Phase.COMPRESSING))
    assert len(reconcile(waiting, Observed({}, frozenset(), 0.0))) == 2
    assert reconcile(replace(waiting, undecodable=("ledger/n",)), Observed({}, frozenset(), 0.0)) == ()
