"""The state as records instead of JSON: what the rest of the control plane reads and commits."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from controlplane.errors import Unavailable
from controlplane.state.base import Snapshot, StateStore, Write
from controlplane.state.records import (
    KINDS,
    Deployment,
    IdempotencyKey,
    Model,
    ModelProfile,
    NodeLedger,
    Operation,
    PathProfile,
    R,
    Record,
    dump,
    key_of,
    load,
)

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Versioned(Generic[T]):
    """A record and the version to expect when writing it back."""

    record: T
    version: int


@dataclass(frozen=True)
class State:
    """All records at one revision, by their key.

    `undecodable` names, as "kind/key", entries that this software cannot read. They still exist: writing them
    with `expected_version` 0 fails, and what they may be about is left as it is.
    """

    revision: int
    models: Mapping[str, Versioned[Model]]
    deployments: Mapping[str, Versioned[Deployment]]
    operations: Mapping[str, Versioned[Operation]]
    idempotency: Mapping[str, Versioned[IdempotencyKey]]
    profiles: Mapping[str, Versioned[ModelProfile]] = field(default_factory=dict)
    ledgers: Mapping[str, Versioned[NodeLedger]] = field(default_factory=dict)
    paths: Mapping[str, Versioned[PathProfile]] = field(default_factory=dict)
    undecodable: tuple[str, ...] = ()

    def unreadable(self, cls: type[Any], key: str) -> bool:
        """Whether there is such a record, of which nothing else is known."""
        return f"{KINDS[cls]}/{key}" in self.undecodable

    def any_unreadable(self, cls: type[Any]) -> bool:
        return any(name.startswith(f"{KINDS[cls]}/") for name in self.undecodable)

    def variants_of(self, base: str) -> list[Model]:
        return [model.record for model in self.models.values() if model.record.base == base]


@dataclass(frozen=True)
class Put:
    """Write a record. `expected_version`: the one that was read, 0 for a new record, None for any."""

    record: Record
    expected_version: int | None


@dataclass(frozen=True)
class Delete:
    """Remove the record of `cls` at `key`; `expected_version` as in `Put`."""

    cls: type[Any]
    key: str
    expected_version: int | None


Change = Put | Delete


class Repository:
    """Typed access to a `StateStore`, which stays its owner's to close. Safe between threads.

    Errors of every method: `Unavailable` when the store does not answer.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._reported: set[str] = set()
        self._reported_lock = threading.Lock()

    def revision(self) -> int:
        return self._store.revision()

    def read(self) -> State:
        """Everything, consistently. Entries that do not decode are left out and reported once."""
        snapshot = self._store.snapshot(tuple(KINDS.values()))
        broken: dict[str, str] = {}
        state = State(
            revision=snapshot.revision,
            models=_decode(Model, snapshot, broken),
            deployments=_decode(Deployment, snapshot, broken),
            operations=_decode(Operation, snapshot, broken),
            idempotency=_decode(IdempotencyKey, snapshot, broken),
            profiles=_decode(ModelProfile, snapshot, broken),
            ledgers=_decode(NodeLedger, snapshot, broken),
            paths=_decode(PathProfile, snapshot, broken),
            undecodable=tuple(broken),
        )
        self._report(broken)
        return state

    async def read_async(self) -> State:
        """`read`, in a thread."""
        return await asyncio.to_thread(self.read)

    def get(self, cls: type[R], key: str) -> Versioned[R] | None:
        """The record, or None when there is none.

        Errors: `Unavailable` when it exists but does not decode; None would invite the caller to
        create it.
        """
        kind = KINDS[cls]
        entry = self._store.get(kind, key)
        if entry is None:
            return None
        try:
            return Versioned(load(cls, entry.value), entry.version)
        except ValueError as error:
            self._report({f"{kind}/{key}": str(error)}, forget=False)
            raise Unavailable(
                f"the stored {kind} {key!r} cannot be read by this version of Ostinato: run the version that "
                "wrote it, or delete it"
            ) from error

    def commit(self, changes: Sequence[Change]) -> int:
        """Apply all changes or none; returns the new revision.

        Errors: `StaleWrite` when an expected version does not hold.
        """
        return self._store.commit([_write(change) for change in changes])

    def _report(self, broken: Mapping[str, str], *, forget: bool = True) -> None:
        """Log what was not logged before; with `forget`, `broken` is all there is and the rest was mended."""
        with self._reported_lock:
            new = [name for name in broken if name not in self._reported]
            self._reported = set(broken) if forget else self._reported | set(broken)
        for name in new:
            kind, _, key = name.partition("/")
            log.error("the stored %s %r does not decode and is ignored: %s", kind, key, broken[name])


def _decode(cls: type[R], snapshot: Snapshot, broken: dict[str, str]) -> dict[str, Versioned[R]]:
    """The records of one kind; why an entry does not decode goes to `broken`."""
    records: dict[str, Versioned[R]] = {}
    for key, entry in snapshot.entries[KINDS[cls]].items():
        try:
            records[key] = Versioned(load(cls, entry.value), entry.version)
        except ValueError as error:  # pydantic's ValidationError is one
            broken[f"{KINDS[cls]}/{key}"] = str(error)
    return records


def _write(change: Change) -> Write:
    if isinstance(change, Put):
        record = change.record
        return Write(KINDS[type(record)], key_of(record), dump(record), change.expected_version)
    return Write(KINDS[change.cls], change.key, None, change.expected_version)
