"""The state as records instead of JSON: what the rest of the control plane reads and commits."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from controlplane.errors import Unavailable
from controlplane.state.base import Changes, Entry, StateStore, Write
from controlplane.state.collector import MANY, LeftAlone, paused
from controlplane.state.installation import identity_of
from controlplane.state.records import (
    KINDS,
    Deployment,
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

# Entries that are decoded before the process's other threads have their turn, for so long: without it these
# wait for Python's lock several milliseconds each time that they need it, while many entries are read.
AT_ONCE, PAUSE_S = 100, 5e-5


@dataclass(frozen=True)
class Versioned(Generic[T]):
    """A record and the version to expect when writing it back."""

    record: T
    version: int


@dataclass(frozen=True)
class State:
    """All records at one revision, by their key, but for those of which there are a day's: who needs one of
    these gets it (`Repository.get`).

    `undecodable` names, as "kind/key", entries that this software cannot read. They still exist: writing them
    with `expected_version` 0 fails, and what they may be about is left as it is.
    """

    revision: int
    models: Mapping[str, Versioned[Model]]
    deployments: Mapping[str, Versioned[Deployment]]
    operations: Mapping[str, Versioned[Operation]]
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

    It keeps the state that it read last, and reads what changed since. Whatever did not is the same object.

    Errors of every method: `Unavailable` when the store does not answer.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._reported: set[str] = set()
        self._lock = threading.Lock()  # of what follows; never held while the store is asked
        self._last: _Read | None = None
        self._left_alone = LeftAlone()

    def revision(self) -> int:
        return self._store.revision()

    def installation(self) -> str:
        """The identity of the store's installation; empty: it has none."""
        return identity_of(self._store)

    def read(self) -> State:
        """What a `State` has, consistently. Entries that do not decode are left out and reported once."""
        last = self._last
        changes = None if last is None else self._store.changes(_KINDS, last.state.revision)
        if last is None or changes is None:
            snapshot = self._store.snapshot(_KINDS)
            read, changes = _NOTHING, Changes(snapshot.revision, snapshot.entries)
        else:
            read = last
        many = sum(map(len, changes.entries.values())) >= MANY
        with paused() if many else nullcontext():
            now = _read_further(read, changes)
            self._keep(last, now)
        self._report(now.broken)
        return now.state

    def _keep(self, last: _Read | None, now: _Read) -> None:
        """Unless another thread has read meanwhile."""
        with self._lock:
            if self._last is not last or now is last:
                return
            self._last = now
        records = _records(now.state)
        self._left_alone.see(records, records - (0 if last is None else _records(last.state)))

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

    def each(self, cls: type[R]) -> Iterator[Versioned[R]]:
        """All of a kind that no `State` has, one after the other, as `StateStore.pages` has them. Those that
        do not decode are left out, and reported once."""
        kind, number = KINDS[cls], 0
        for page in self._store.pages(kind):
            for key, entry in page.items():
                number += 1
                if number % AT_ONCE == 0:
                    time.sleep(PAUSE_S)
                try:
                    yield Versioned(load(cls, entry.value), entry.version)
                except ValueError as error:
                    self._report({f"{kind}/{key}": str(error)}, forget=False)

    def commit(self, changes: Sequence[Change]) -> int:
        """Apply all changes or none; returns the new revision.

        Errors: `StaleWrite` when an expected version does not hold.
        """
        return self._store.commit([_write(change) for change in changes])

    def _report(self, broken: Mapping[str, str], *, forget: bool = True) -> None:
        """Log what was not logged before; with `forget`, `broken` is all there is in a
        state, and the rest of that was mended."""
        if not broken and not self._reported:
            return
        with self._lock:
            new = [name for name in broken if name not in self._reported]
            kept = self._reported if not forget else {n for n in self._reported if not n.startswith(_READ)}
            self._reported = kept | set(broken)
        for name in new:
            kind, _, key = name.partition("/")
            log.error("the stored %s %r does not decode and is ignored: %s", kind, key, broken[name])


@dataclass(frozen=True)
class _Read:
    """A state, and why entries do not decode, by "kind/key"."""

    state: State
    broken: Mapping[str, str]


# Where a State has the records of each class.
_FIELDS: Mapping[type[Any], str] = {
    Model: "models",
    Deployment: "deployments",
    Operation: "operations",
    ModelProfile: "profiles",
    NodeLedger: "ledgers",
    PathProfile: "paths",
}
_KINDS = tuple(KINDS[cls] for cls in _FIELDS)
_READ = tuple(f"{kind}/" for kind in _KINDS)  # how the names of a state's entries begin


def _records(state: State) -> int:
    """How many there are."""
    return sum(len(getattr(state, name)) for name in _FIELDS.values())


_NOTHING = _Read(State(-1, {}, {}, {}), {})


def _read_further(last: _Read, changes: Changes) -> _Read:
    if changes.revision == last.state.revision and not changes.entries:
        return last
    broken = dict(last.broken)
    fields: dict[str, Any] = {}
    for cls, field_name in _FIELDS.items():
        if entries := changes.entries.get(KINDS[cls]):
            fields[field_name] = _updated(cls, getattr(last.state, field_name), entries, broken)
    if broken != last.broken:
        fields["undecodable"] = tuple(broken)
    state = replace(last.state, revision=changes.revision, **fields)
    return _Read(state, broken)


def _updated(
    cls: type[R],
    records: Mapping[str, Versioned[R]],
    entries: Mapping[str, Entry | None],
    broken: dict[str, str],
) -> dict[str, Versioned[R]]:
    """Why an entry does not decode goes to `broken`."""
    updated = dict(records)
    for number, (key, entry) in enumerate(entries.items(), start=1):
        if number % AT_ONCE == 0:
            time.sleep(PAUSE_S)
        broken.pop(name := f"{KINDS[cls]}/{key}", None)
        if entry is None:
            updated.pop(key, None)
            continue
        try:
            updated[key] = Versioned(load(cls, entry.value), entry.version)
        except ValueError as error:  # pydantic's ValidationError is one
            broken[name] = str(error)
            updated.pop(key, None)
    return updated


def _write(change: Change) -> Write:
    if isinstance(change, Put):
        record = change.record
        return Write(KINDS[type(record)], key_of(record), dump(record), change.expected_version)
    return Write(KINDS[change.cls], change.key, None, change.expected_version)
