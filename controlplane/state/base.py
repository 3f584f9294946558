"""The state store's contract: a few kinds of keyed JSON records, changed by atomic compare-and-set.

A store has one revision, raised by every commit; an entry's version is the revision that wrote it. Readers
poll `revision()` (cheap). When it has changed, they read the `changes()` since the last revision that they
know.

A lease is a right that only one process can hold. Its epoch grows with each new holder. A commit that carries
the lease is refused when another process has it by now (a fencing token).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from controlplane.errors import StaleWrite


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
class Changes:
    """Entries written after an earlier revision, as of `revision`; None: deleted."""

    revision: int
    entries: Mapping[str, Mapping[str, Entry | None]]


@dataclass(frozen=True)
class Write:
    """Set (or, with value None, delete) one entry.

    `expected_version` is the version that the writer saw; 0: the entry must not exist; None: any version.
    """

    kind: str
    key: str
    value: str | None
    expected_version: int | None


@dataclass(frozen=True)
class Require:
    """Part of a commit: an entry must have this value, and stays unchanged. Otherwise nothing is written."""

    kind: str
    key: str
    value: str


@dataclass(frozen=True)
class Lease:
    """The holder of the right called `name`. Every holder has a different epoch."""

    name: str
    holder: str
    epoch: int


class Fenced(Exception):
    """Another process has the commit's lease by now. Nothing was written, nor will be with this lease."""

    def __init__(self, lease: Lease) -> None:
        super().__init__(f"{lease.holder} no longer holds the lease '{lease.name}' (epoch {lease.epoch})")


def not_as_required(required: Require) -> StaleWrite:
    return StaleWrite(
        f"{required.kind} {required.key!r} has changed since it was read; read it again",
        details={"kind": required.kind, "key": required.key},
    )


class StateStore(Protocol):
    """Implementations are safe to call from several threads and processes.

    Errors: `controlplane.errors.StaleWrite` when an expectation does not hold (nothing is written);
    `controlplane.errors.Unavailable` when the backend does not answer.
    """

    def revision(self) -> int: ...

    def snapshot(self, kinds: Sequence[str]) -> Snapshot: ...

    def changes(self, kinds: Sequence[str], since: int) -> Changes | None:
        """Entries of `kinds` written after the revision `since`. None: unknown, or no longer known."""
        ...

    def get(self, kind: str, key: str) -> Entry | None: ...

    def pages(self, kind: str) -> Iterator[Mapping[str, Entry]]:
        """The entries of a kind, a few at a time, so that other work need not wait long. They are of no
        single revision: an entry written meanwhile may be in none, one or several pages."""
        ...

    def commit(self, writes: Sequence[Write | Require], lease: Lease | None = None) -> int:
        """Apply all writes or none; returns the new revision. An empty sequence changes nothing.

        Errors: `Fenced` when another process has the `lease` by now (nothing is written).
        """
        ...

    def take_lease(self, name: str, holder: str, seconds: float, gone: str | None = None) -> Lease:
        """Take or prolong a lease for `seconds` from now by the store's own clock; returns the current lease.

        A current holder keeps the lease, unless that is the process named `gone`. The revision does not
        change.
        """
        ...

    def release_lease(self, lease: Lease) -> None:
        """Let other processes take the lease at once; does nothing if another one has it already."""
        ...

    def close(self) -> None: ...
