"""The state store's contract: a few kinds of keyed JSON records, changed by atomic compare-and-set.

A store has one revision, raised by every commit; an entry's version is the revision that wrote it.
Readers poll `revision()` (cheap), and take the `changes()` since the one they know when it moved.

One of several processes may hold a lease, a right of which there is one. Its epoch grows with each new
holder, and a commit that carries the lease is refused once somebody else has it (a fencing token).
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
    """What was written after an earlier revision, as it is at `revision`; None: deleted."""

    revision: int
    entries: Mapping[str, Mapping[str, Entry | None]]


@dataclass(frozen=True)
class Write:
    """Set (or, with value None, delete) one entry.

    `expected_version` is the version the writer saw: 0 means "must not exist"; None means "whatever".
    """

    kind: str
    key: str
    value: str | None
    expected_version: int | None


@dataclass(frozen=True)
class Require:
    """Part of a commit: an entry has this value, and stays as it is. Else nothing is written."""

    kind: str
    key: str
    value: str


@dataclass(frozen=True)
class Lease:
    """Who holds the right called `name`. No two holders of it ever had the same epoch."""

    name: str
    holder: str
    epoch: int


class Fenced(Exception):
    """A commit carried a lease that is another's by now. Nothing was written, nor will be with this lease."""

    def __init__(self, lease: Lease) -> None:
        super().__init__(f"the lease '{lease.name}' is not {lease.holder}'s any more (epoch {lease.epoch})")


def not_as_required(required: Require) -> StaleWrite:
    return StaleWrite(
        f"{required.kind} {required.key!r} is not what this commit requires; read it again",
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
        """What was written to entries of `kinds` after the revision `since`. None: not known (any more)."""
        ...

    def get(self, kind: str, key: str) -> Entry | None: ...

    def pages(self, kind: str) -> Iterator[Mapping[str, Entry]]:
        """The entries of a kind, some at a time, so that nobody waits for long. They are of no one revision:
        what is written meanwhile may be in none, one or several of them."""
        ...

    def commit(self, writes: Sequence[Write | Require], lease: Lease | None = None) -> int:
        """Apply all writes or none; returns the new revision. An empty sequence changes nothing.

        Errors: `Fenced` when `lease` is another's by now (nothing is written).
        """
        ...

    def take_lease(self, name: str, holder: str, seconds: float, gone: str | None = None) -> Lease:
        """Take or prolong a lease, for so long from now by the store's own clock; returns whose it is.

        It stays another's who still has it, unless that is `gone`. It raises no revision.
        """
        ...

    def release_lease(self, lease: Lease) -> None:
        """Let others have it at once; does nothing when they already do."""
        ...

    def close(self) -> None: ...
