"""The state store's contract: a few kinds of keyed JSON records, changed by atomic compare-and-set.

A store has one revision, raised by every commit; an entry's version is the revision that wrote it.
Readers poll `revision()` (cheap) and take a `snapshot()` when it moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Entry:
    value: str
    version: int


@dataclass(frozen=True)
class Snapshot:
    """All entries of the asked kinds at one revision: `entries[kind][key]`."""

    revision: int
    entries: Mapping[str, Mapping[str, Entry]]


@dataclass(frozen=True)
class Write:
    """Set (or, with value None, delete) one entry.

    `expected_version` is the version the writer saw: 0 means "must not exist"; None means "whatever".
    """

    kind: str
    key: str
    value: str | None
    expected_version: int | None


class StateStore(Protocol):
    """Implementations are safe to call from several threads and processes.

    Errors: `controlplane.errors.StaleWrite` when an expectation does not hold (nothing is written);
    `controlplane.errors.Unavailable` when the backend does not answer.
    """

    def revision(self) -> int: ...

    def snapshot(self, kinds: Sequence[str]) -> Snapshot: ...

    def get(self, kind: str, key: str) -> Entry | None: ...

    def commit(self, writes: Sequence[Write]) -> int:
        """Apply all writes or none; returns the new revision. An empty sequence changes nothing."""
        ...

    def close(self) -> None: ...
