"""The state as records instead of JSON, for the rest of the control plane."""

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

# Entries that are decoded before the process pauses for PAUSE_S to let other threads run. Without the pause,
# other threads wait for Python's lock several milliseconds at a time while many entries are read.
AT_ONCE, PAUSE_S = 100, 5e-5


@dataclass(frozen=True)
class Versioned(Generic[T]):
    """A record and the version to expect when writing it back."""

    record: T
    version: int


@dataclass(frozen=True)
class State:
    """All records at one revision, by their key. Kinds with a day's worth of records are not included
    (`Repository.get`).

    `undecodable` names, as "kind/key", entries that this software cannot read. They still exist: writing them
    with `expected_version` 0 fails, and everything that they may concern stays unchanged.
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
        """Whether there is such a record, which cannot be read."""
        return f"{KINDS[cls]}/{key}" in self.undecodable

    def any_unreadable(self, cls: type[Any]) -> bool:
        return any(name.startswith(f"{KINDS[cls]}/") for name in self.undecodable)

    def variants_of(self, base: str) -> list[Model]:
        return [model.record for model in self.models.values() if model.record.base == base]


@dataclass(frozen=True)
class Put:
    """Write a record. `expected_version`: the version that was read, 0 for a new record, None for any."""

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
    """Typed access to a `StateStore`, which the caller closes. Safe between threads.

    It keeps the last state, and reads only the changes since. Unchanged records are the same objects.

    Errors of every method: `Unavailable` when the store does not answer.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._reported: set[str] = set()
        self._lock = threading.Lock()  # for the fields below; never held during a call of the store
        self._last: _Read | None = None
        self._left_alone = LeftAlone()

    def revision(self) -> int:
        return self._store.revision()

    def installation(self) -> str:
        """The identity of the store's installation; empty: it has none."""
        return identity_of(self._store)

    def read(self) -> State:
        """A consistent `State`. Entries that cannot be decoded are left out and reported once."""
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
        """Keep the new state, unless another thread has read one meanwhile."""
        with self._lock:
            if self._last is not last or now is last:
                return
            self._last = now
        records = _records(now.state)
        self._left_alone.see(records, records - (0 if last is None else _records(last.state)))

    async def read_async(self) -> State:
        """`read` in a thread."""
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
                f"this version of Ostinato cannot read the stored {kind} {key!r}; run the version that wrote "
                "it, or delete this record"
            ) from error

    def each(self, cls: type[R]) -> Iterator[Versioned[R]]:
        """All records of a kind that is not in a `State`, in the pages of `StateStore.pages`. Records that
        cannot be decoded are left out, and reported once."""
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
        """Log the entries that were not logged before. With `forget`, `broken` is complete for a state, so
        entries that are no longer in it were repaired."""
        if not broken and not self._reported:
            return
        with self._lock:
            new = [name for name in broken if name not in self._reported]
            kept = self._reported if not forget else {n for n in self._reported if not n.startswith(_READ)}
            self._reported = kept | set(broken)
        for name in new:
            kind, _, key = name.partition("/")
            log.error("the stored %s %r cannot be decoded and is ignored: %s", kind, key, broken[name])


@dataclass(frozen=True)
class _Read:
    """A state, and the reasons why entries cannot be decoded, by "kind/key"."""

    state: State
    broken: Mapping[str, str]


# The field of a State for the records of each class.
_FIELDS: Mapping[type[Any], str] = {
    Model: "models",
    Deployment: "deployments",
    Operation: "operations",
    ModelProfile: "profiles",
    NodeLedger: "ledgers",
    PathProfile: "paths",
}
_KINDS = tuple(KINDS[cls] for cls in _FIELDS)
_READ = tuple(f"{kind}/" for kind in _KINDS)  # prefixes of the names of a state's entries


def _records(state: State) -> int:
    """The number of records."""
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
    """The records after the changes; reasons why entries cannot be decoded go to `broken`."""
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
        except ValueError as error:  # includes pydantic's ValidationError
            broken[name] = str(error)
            updated.pop(key, None)
    return updated


def _write(change: Change) -> Write:
    if isinstance(change, Put):
        record = change.record
        return Write(KINDS[type(record)], key_of(record), dump(record), change.expected_version)
    return Write(KINDS[change.cls], change.key, None, change.expected_version)
