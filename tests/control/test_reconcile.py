"""Situations and what is to be done about them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import PLACED, deployment, model, operation, state
from hypothesis import given
from hypothesis import strategies as st

from controlplane.reconcile import (
    KEEP_KEYS_S,
    KEEP_OPERATIONS,
    Cancel,
    ConfirmDeployed,
    EngineStatus,
    EngineView,
    FailDeployment,
    Forget,
    Launch,
    LoadVariant,
    Observed,
    Profile,
    Release,
    StopEngine,
    UnloadVariant,
    open_operation,
    reconcile,
)
from controlplane.records import IdempotencyKey, NodeLedger, OperationKind, Phase, Reservation

RUNNING, STARTING = EngineView(EngineStatus.RUNNING), EngineView(EngineStatus.STARTING)
FAILED, LEAVING = EngineView(EngineStatus.FAILED), EngineView(EngineStatus.DELETING)
ILL = EngineView(EngineStatus.UNHEALTHY)


BASE_UP = deployment("b", Phase.DEPLOYED)
PROMISE = Reservation("b", BASE_UP.uid, 0, "cpu", 0, 1, 0.0)
DEPLOY, REGISTER = OperationKind.DEPLOY, OperationKind.REGISTER

SITUATIONS: list[tuple[str, tuple[Any, ...], dict[str, EngineView], tuple[Any, ...]]] = [
    ("nothing", (), {}, ()),
    ("a new model", (model("b", Phase.PENDING),), {}, (Profile("b"),)),
    ("profiling was interrupted", (model("b", Phase.PROFILING),), {}, (Profile("b"),)),
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
    ("an engine that runs", (deployment("b", Phase.DEPLOYING),), {"b": RUNNING}, (ConfirmDeployed("b"),)),
    ("an engine that failed", (deployment("b", Phase.DEPLOYING),), {"b": FAILED}, (FailDeployment("b"),)),
    ("all is well", (BASE_UP,), {"b": RUNNING}, ()),
    ("an ill engine is Serve's to restart", (BASE_UP,), {"b": ILL}, ()),
    ("the cluster restarted", (BASE_UP,), {}, (Launch("b"),)),
    ("an engine that leaves is waited for", (deployment("b", Phase.PENDING),), {"b": LEAVING}, ()),
    (
        "an earlier deployment's engine",
        (deployment("b", Phase.PENDING, placed=None),),
        {"b": RUNNING},
        (StopEngine("b"),),
    ),
    ("an undeployment", (deployment("b", Phase.DELETING),), {"b": RUNNING}, (StopEngine("b"),)),
    ("an undeployment half done", (deployment("b", Phase.DELETING),), {}, (StopEngine("b"),)),
    (
        "a cancelled deployment",
        (deployment("b", Phase.DEPLOYING), operation(DEPLOY, "b", cancel_requested=True)),
        {"b": RUNNING},
        (Cancel("op-1"),),
    ),
    ("an engine nobody wants", (), {"b": RUNNING}, (StopEngine("b"),)),
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
    ("a variant without base", (deployment("v", Phase.PENDING, "b"),), {}, (FailDeployment("v"),)),
]


@pytest.mark.parametrize(
    ("records", "engines", "actions"), [s[1:] for s in SITUATIONS], ids=[s[0] for s in SITUATIONS]
)
def test_situation(records: tuple[Any, ...], engines: dict[str, EngineView], actions: Any) -> None:
    assert reconcile(state(*records), Observed(engines, frozenset(), 0.0)) == actions


def test_a_stranger_is_not_stopped_while_its_launch_runs() -> None:
    observed = Observed({"b": RUNNING}, frozenset({"Launch:b"}), 0.0)
    assert reconcile(state(deployment("b", Phase.PENDING, placed=None)), observed) == ()
    assert reconcile(state(), observed) == ()


def test_what_fails_is_not_launched_while_it_is_undone() -> None:
    """Its engine is stopped before its record is gone."""
    failing = state(deployment("b", Phase.DEPLOYING))
    assert reconcile(failing, Observed({}, frozenset({"FailDeployment:b"}), 0.0)) == ()
    assert reconcile(failing, Observed({}, frozenset(), 0.0)) == (Launch("b"),)


def test_old_operations_and_expired_keys_are_forgotten() -> None:
    done = [
        replace(operation(DEPLOY, "b", phase=Phase.DEPLOYED), id=f"op-{n:05}", updated_at_s=float(n))
        for n in range(KEEP_OPERATIONS + 2)
    ]
    keys = [IdempotencyKey("old", "", "op", 0.0), IdempotencyKey("new", "", "op", KEEP_KEYS_S)]
    found = reconcile(state(*done, *keys), Observed({}, frozenset(), KEEP_KEYS_S + 1))
    assert found == (Forget("op-00000"), Forget("op-00001"), Forget("old"))


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
