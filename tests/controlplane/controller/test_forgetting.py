"""Which records are dropped, and what the records of a day are still used for."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from controlplane.controller import forgetting
from controlplane.controller.forgetting import Forgetting
from controlplane.errors import Unavailable
from controlplane.planning import reconcile
from controlplane.state.records import (
    IdempotencyKey,
    Operation,
    OperationEvent,
    OperationKind,
    PastOperation,
    Phase,
)
from controlplane.state.repository import Change, Put, Repository
from testkit.controlplane.builders import operation

ENDED = replace(
    operation(OperationKind.DEPLOY, "b"),
    phase=Phase.DEPLOYED,
    events=(OperationEvent(1.5, Phase.DEPLOYED, "x"),),
)


def numbered(count: int) -> list[Operation]:
    """The second began two days ago."""
    now_s = time.time()
    began_s = {1: now_s - 2 * reconcile.KEEP_KEYS_S}
    return [
        replace(ENDED, id=f"op-{n}", updated_at_s=float(n), created_at_s=began_s.get(n, now_s))
        for n in range(count)
    ]


async def test_the_outcomes_of_forgotten_operations_are_kept(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile, "KEEP_OPERATIONS", 2)
    ended = numbered(5)
    repository.commit([Put(each, 0) for each in ended])
    await Forgetting(repository).operations("")
    assert set(repository.read().operations) == {"op-3", "op-4"}
    kept = {found.record.id: found.record for found in repository.each(PastOperation)}
    assert {name: past.operation for name, past in kept.items()} == {
        each.id: replace(each, events=()) for each in (ended[0], ended[2])
    }


async def test_only_what_is_a_day_old_goes_some_at_a_time(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forgetting, "FORGET_AT_ONCE", 3)
    now_s = time.time()
    commits: list[int] = []
    old_s = now_s - reconcile.KEEP_KEYS_S - 60
    for number in range(8):
        since_s = old_s if number % 4 else now_s
        repository.commit(
            [
                Put(IdempotencyKey(f"key-{number}", "ab", f"op-{number}", since_s), 0),
                Put(PastOperation(f"op-{number}", replace(ENDED, created_at_s=since_s)), 0),
            ]
        )
    commit = repository.commit

    def counted(gone: Sequence[Change]) -> int:
        commits.append(len(gone))
        return commit(gone)

    monkeypatch.setattr(repository, "commit", counted)
    forgets = Forgetting(repository)
    await forgets.keys("")
    assert {found.record.key for found in repository.each(IdempotencyKey)} == {"key-0", "key-4"}
    assert {found.record.id for found in repository.each(PastOperation)} == {"op-0", "op-4"}
    assert (sum(commits), max(commits)) == (12, 3)
    assert now_s <= forgets.keys_seen_s <= time.time()


async def test_keys_are_seen_through_again_when_the_store_did_not_answer(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(cls: type[object]) -> Iterator[object]:
        raise Unavailable("the store does not answer")

    monkeypatch.setattr(repository, "each", away)
    forgets = Forgetting(repository)
    with pytest.raises(Unavailable):
        await forgets.keys("")
    assert forgets.keys_seen_s == 0.0
