"""Change records safely: read, decide, commit, and repeat if another process was faster."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from controlplane import errors
from controlplane.state.records import Asker, Operation, R
from controlplane.state.repository import Change, Put, Repository, State, Versioned

T = TypeVar("T")

ATTEMPTS = 32


class Superseded(Exception):
    """The record to change no longer exists: the process that deleted it decides, and this work is moot."""


@dataclass(frozen=True)
class Context:
    """Inputs that a pure function may not fetch itself: a fresh operation id, fresh uids, the time, the
    client.

    `tenant` owns a model that is registered, and `max_host_bytes` is the quota of its variants.
    """

    operation_id: str
    uids: tuple[int, ...]
    now_s: float
    tenant: str = ""
    asked_by: Asker | None = None
    max_host_bytes: int | None = None


@dataclass(frozen=True)
class Outcome:
    operation: Operation
    changes: Sequence[Change]


def persist(work: Callable[[], T], what: str = "the state") -> T:
    """Repeat `work` (read, decide, commit) while others are faster. StaleWrite after many lost races."""
    for attempt in range(ATTEMPTS):
        try:
            return work()
        except errors.StaleWrite:
            _pause(attempt)
    raise errors.StaleWrite(f"other requests change {what} at the same time; try again")


def _pause(attempt: int) -> None:
    """Pause after a lost race: longer after more losses, and for a random time."""
    time.sleep(random.uniform(0, min(0.1, 0.002 * 2**attempt)))


def edit(repository: Repository, cls: type[R], key: str, change: Callable[[R], R]) -> Versioned[R]:
    """Replace the record by `change` of it. Raises Superseded; StaleWrite after many lost races."""

    def once() -> Versioned[R]:
        versioned = repository.get(cls, key)
        if versioned is None:
            raise Superseded(f"{cls.__name__} {key}")
        new = change(versioned.record)
        return Versioned(new, repository.commit([Put(new, versioned.version)]))

    return persist(once, f"{cls.__name__} '{key}'")


def submit(
    repository: Repository,
    decide: Callable[[State], Outcome],
    also: Callable[[Outcome], Sequence[Change]] = lambda outcome: (),
) -> Outcome:
    """Commit the result of `decide` on the newest state; after a lost race it decides again."""

    def once() -> Outcome:
        outcome = decide(repository.read())
        repository.commit([*outcome.changes, *also(outcome)] if outcome.changes else [])
        return outcome

    return persist(once)
