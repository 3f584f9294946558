"""Records through the typed layer, on a real store."""

from __future__ import annotations

import dataclasses
import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controlplane.errors import StaleWrite, Unavailable
from controlplane.state import StateStore, Write
from controlplane.state.collector import paused
from controlplane.state.records import (
    Attempts,
    Deployment,
    IdempotencyKey,
    Model,
    NodeLedger,
    Operation,
    OperationEvent,
    OperationKind,
    PastOperation,
    PathProfile,
    Phase,
    Record,
    Reservation,
    dump,
)
from controlplane.state.repository import Delete, Put, Repository, State, Versioned
from controlplane.state.stores import open_store
from placement.types import Intent, Slos
from profiler.request_path import RequestPath
from profiler.types import ModelSpec
from profiler.variants.types import ModuleFacts, VariantKind, VariantSpec

SPEC = ModelSpec("LlamaForCausalLM", 2, 64, 4, 2, 16, 100, 512, 2, 1000, 2000, {"q_proj": (64, 64)})
BASE = Model("base", 1, Phase.READY, source="/m/base", compression={"int8": 0.97}, spec=SPEC)
VARIANT_SPEC = VariantSpec(VariantKind.SVD_DELTA, 99, {"q_proj": ModuleFacts(9, rank=8)}, (8, 3), 7, True)
VARIANT = Model("größe/模型", 2, Phase.PENDING, base="base", variant_spec=VARIANT_SPEC)
DEPLOYMENT = Deployment("base", 3, "base", Phase.DEPLOYED, Intent.MIN_COST, 128, Slos(latency_s=1.5))
OPERATION = Operation(
    "op-1",
    OperationKind.DEPLOY,
    "base",
    Phase.FAILED,
    error={"message": "no", "details": {"n": 1}},
    events=(OperationEvent(1.5, Phase.PENDING, "asked"),),
)
KEY = IdempotencyKey("key-1", "ab" * 32, "op-1", 2.25)
PAST = PastOperation("op-0", dataclasses.replace(OPERATION, id="op-0", events=()))
LEDGER = NodeLedger("node-1", (Reservation("base", 3, 1, "h200", 0, 7 << 30, 3.5),))
PATH = PathProfile(
    "1_vllm-1_serve_1", RequestPath(9e-3, 1e-3, 2e-6, 0.8, 1.3), Attempts(1, 2.5, 3.5, "late"), 4.5
)
RECORDS: tuple[Record, ...] = (BASE, VARIANT, DEPLOYMENT, OPERATION, KEY, PAST, LEDGER, PATH)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateStore]:
    store = open_store(f"sqlite://{tmp_path}/state.db")
    yield store
    store.close()


@pytest.fixture
def repository(store: StateStore) -> Repository:
    return Repository(store)


def test_an_empty_state_has_no_records(repository: Repository) -> None:
    assert repository.read() == State(0, {}, {}, {})
    assert repository.get(Model, "base") is None
    assert repository.commit([]) == repository.revision() == 0


def test_every_kind_is_read_back_as_it_was_put(repository: Repository) -> None:
    revision = repository.commit([Put(record, 0) for record in RECORDS])
    assert repository.read() == State(
        revision,
        models={"base": Versioned(BASE, revision), "größe/模型": Versioned(VARIANT, revision)},
        deployments={"base": Versioned(DEPLOYMENT, revision)},
        operations={"op-1": Versioned(OPERATION, revision)},
        ledgers={"node-1": Versioned(LEDGER, revision)},
        paths={PATH.key: Versioned(PATH, revision)},
    )
    assert repository.get(Model, "größe/模型") == Versioned(VARIANT, revision)
    assert repository.get(Deployment, "base") == Versioned(DEPLOYMENT, revision)
    assert repository.get(Operation, "op-1") == Versioned(OPERATION, revision)
    assert repository.get(IdempotencyKey, "key-1") == Versioned(KEY, revision)
    assert repository.get(PastOperation, "op-0") == Versioned(PAST, revision)


def _recorded(ask: Callable[..., Any], asked: list[Sequence[str]]) -> Callable[..., Any]:
    def recorded(kinds: Sequence[str], *since: int) -> Any:
        asked.append(kinds)
        return ask(kinds, *since)

    return recorded


def test_a_state_does_not_read_idempotency_keys(store: StateStore) -> None:
    """A state does not even ask for them."""
    earlier, writer = Repository(store), Repository(store)
    assert earlier.read().revision == 0  # what comes now is read as changes
    revision = writer.commit([Put(OPERATION, 0), Put(KEY, 0), Put(PAST, 0)])
    asked: list[Sequence[str]] = []
    for name in ("snapshot", "changes"):
        setattr(store, name, _recorded(getattr(store, name), asked))
    for repository in (earlier, Repository(store)):
        state = repository.read()
        assert (state.revision, state.operations["op-1"].record) == (revision, OPERATION)
        assert repository.get(IdempotencyKey, "key-1") == Versioned(KEY, revision)
    assert len(asked) == 2
    assert not {"idempotency", "past_operation"} & {kind for kinds in asked for kind in kinds}


def test_each_of_a_kind_that_decodes(store: StateStore) -> None:
    repository = Repository(store)
    revision = repository.commit([Put(KEY, 0), Put(OPERATION, 0), Put(PAST, 0)])
    store.commit([Write("idempotency", "bad", "{", 0)])
    assert list(repository.each(IdempotencyKey)) == [Versioned(KEY, revision)]
    assert list(repository.each(PastOperation)) == [Versioned(PAST, revision)]


def test_records_are_the_same_over_redis(redis_url: str, tmp_path: Path) -> None:
    store = open_store(f"{redis_url}?prefix=typed-{tmp_path.name}-{id(tmp_path)}")
    repository = Repository(store)
    repository.commit([Put(record, 0) for record in RECORDS])
    state = repository.read()
    assert {v.record.name for v in state.models.values()} == {"base", "größe/模型"}
    assert state.operations["op-1"].record == OPERATION
    assert [each.record for each in repository.each(IdempotencyKey)] == [KEY]
    store.close()


def many(count: int) -> list[Put]:
    return [Put(dataclasses.replace(OPERATION, id=f"op-{number}"), 0) for number in range(count)]


def test_other_work_runs_while_many_records_are_read(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that sleeps gives Python's lock away."""
    turns: list[float] = []
    monkeypatch.setattr("controlplane.state.repository.time", SimpleNamespace(sleep=turns.append))
    repository.commit(many(950))
    assert len(repository.read().operations) == 950
    assert len(turns) == 9
    assert min(turns) > 0


@pytest.mark.parametrize("at_once", [60, 7], ids=["in one reading", "a few at a time"])
def test_many_records_are_no_matter_of_the_collector(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Records go when no reader has them any longer."""
    for module in ("repository", "collector"):
        monkeypatch.setattr(f"controlplane.state.{module}.MANY", 50)
    puts = many(60)
    try:
        for first in range(0, 60, at_once):
            repository.commit(puts[first : first + at_once])
            repository.read()
        assert gc.isenabled()
        looked_at = {id(each) for each in gc.get_objects()}  # those that are left alone are none of them
        known = repository.read().operations
        alone = [key for key, each in known.items() if id(each.record) not in looked_at]
        assert len(alone) >= 50
        gone = weakref.ref(known[alone[0]].record)
        del known
        repository.commit([Delete(Operation, alone[0], None)])
        repository.read()
        assert gone() is None
    finally:
        gc.unfreeze()
        gc.collect()
        gc.freeze()  # as conftest has it


def test_few_records_that_change_often_are_not_many(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector goes on looking at what else is made meanwhile."""
    for module in ("repository", "collector"):
        monkeypatch.setattr(f"controlplane.state.{module}.MANY", 50)
    frozen: list[None] = []
    monkeypatch.setattr("controlplane.state.collector.gc.freeze", lambda: frozen.append(None))
    revision = repository.commit([Put(OPERATION, 0)])
    for number in range(60):
        revision = repository.commit([Put(dataclasses.replace(OPERATION, created_at_s=number), revision)])
        repository.read()
    assert not frozen
    repository.commit(many(60)[2:])  # "op-1" is there
    repository.read()
    assert frozen


def test_the_collector_rests_until_the_last_of_several_readers_has_ended() -> None:
    first, second = paused(), paused()
    assert gc.isenabled()
    with ExitStack() as both:
        both.enter_context(second)
        with first:
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_record_is_changed_only_at_the_version_that_was_read(repository: Repository) -> None:
    first = repository.commit([Put(BASE, 0)])
    changed = dataclasses.replace(BASE, phase=Phase.FAILED)
    second = repository.commit([Put(changed, first)])
    with pytest.raises(StaleWrite, match="model 'base'"):
        repository.commit([Put(OPERATION, 0), Put(BASE, first)])
    assert repository.get(Model, "base") == Versioned(changed, second)
    assert repository.read().operations == {}


def test_a_deleted_record_is_gone(repository: Repository) -> None:
    revision = repository.commit([Put(BASE, 0), Put(DEPLOYMENT, 0)])
    with pytest.raises(StaleWrite):
        repository.commit([Delete(Model, "base", revision + 1)])
    repository.commit([Delete(Model, "base", revision), Put(OPERATION, 0)])
    state = repository.read()
    assert state.models == {}
    assert set(state.deployments) == {"base"}  # the same key of another kind
    assert set(state.operations) == {"op-1"}


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"name": "odd", "uid": 1, "phase": "Levitating"}', '{"name": "odd", "uid": "one"}'],
)
def test_an_undecodable_record_is_left_out_and_named(
    store: StateStore, repository: Repository, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    repository.commit([Put(BASE, 0), Put(OPERATION, 0)])
    store.commit([Write("model", "odd", text, 0)])
    with caplog.at_level(logging.ERROR):
        states = [repository.read() for _ in range(3)]
        with pytest.raises(Unavailable, match="cannot read the stored model 'odd'"):
            repository.get(Model, "odd")
    for state in states:
        assert state.undecodable == ("model/odd",)
        assert set(state.models) == {"base"}
        assert set(state.operations) == {"op-1"}
    assert len(caplog.records) == 1
    assert "model 'odd'" in caplog.messages[0]


def test_a_broken_record_can_be_mended_or_deleted_and_is_reported_when_it_breaks_again(
    store: StateStore, repository: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        store.commit([Write("model", "base", "{", None)])
        assert repository.read().undecodable == ("model/base",)
        with pytest.raises(StaleWrite):
            repository.commit([Put(BASE, 0)])
        repository.commit([Put(BASE, None)])
        assert repository.read().undecodable == ()
    assert len(caplog.records) == 2
    store.commit([Write("operation", "x", "{", None)])
    repository.commit([Delete(Operation, "x", None)])
    assert repository.read().undecodable == ()


def test_records_that_need_newer_software_are_left_alone(store: StateStore, repository: Repository) -> None:
    text = dump(BASE)
    assert text.startswith('{"schema":1,')
    store.commit([Write("model", "base", text.replace('"schema":1', '"schema":2', 1), 0)])
    assert repository.read().undecodable == ("model/base",)
    with pytest.raises(Unavailable, match="this version of Ostinato cannot read"):
        repository.get(Model, "base")


def test_records_of_before_there_were_schemas(store: StateStore, repository: Repository) -> None:
    store.commit([Write("model", "base", dump(BASE).replace('"schema":1,', "", 1), 0)])
    assert repository.read().models["base"].record == BASE


def test_newer_software_may_add_fields(store: StateStore, repository: Repository) -> None:
    store.commit([Write("model", "base", dump(BASE)[:-1] + ',"colour": "blue"}', 0)])
    assert repository.read().models["base"].record == BASE
