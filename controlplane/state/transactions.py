"""Changing one record safely: read, decide, write, and again if somebody was faster."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from controlplane import errors
from controlplane.api.commands import Outcome
from controlplane.state.records import R
from controlplane.state.repository import Change, Put, Repository, State, Versioned

ATTEMPTS = 32


class Gone(Exception):
    """The record to change no longer exists: whoever deleted it decides, and this work is moot."""


def pause(attempt: int) -> None:
    """After a lost race: longer the more were lost, and never the same for all."""
    time.sleep(random.uniform(0, min(0.1, 0.002 * 2**attempt)))


def edit(repository: Repository, cls: type[R], key: str, change: Callable[[R], R]) -> Versioned[R]:
    """Replace the record by `change` of it. Raises Gone; StaleWrite after several lost races."""
    for attempt in range(ATTEMPTS):
        found = repository.get(cls, key)
        if found is None:
            raise Gone(f"{cls.__name__} {key}")
        try:
            new = change(found.record)
            return Versioned(new, repository.commit([Put(new, found.version)]))
        except errors.StaleWrite:
            pause(attempt)
    raise errors.StaleWrite(f"{cls.__name__} '{key}' is being changed too often; try again")


def submit(
    repository: Repository,
    decide: Callable[[State], Outcome],
    also: Callable[[Outcome], Sequence[Change]] = lambda outcome: (),
) -> Outcome:
    """Commit what `decide` makes of the newest state; lost races decide anew."""
    for attempt in range(ATTEMPTS):
        outcome = decide(repository.read())
        changes = [*outcome.changes, *also(outcome)] if outcome.changes else []
        try:
            repository.commit(changes)
            return outcome
        except errors.StaleWrite:
            pause(attempt)
    raise errors.StaleWrite("the state is being changed too often; try again")
