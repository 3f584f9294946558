"""Drop records that are no longer needed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice

from controlplane.planning.reconcile import expired, old_operations
from controlplane.state.records import IdempotencyKey, Operation, PastOperation
from controlplane.state.repository import Change, Delete, Put, Repository, State

FORGET_AT_ONCE = 500  # per commit, because a commit delays others


class Forgetting:
    """`keys_seen_s`: when idempotency keys were last searched."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self.keys_seen_s = 0.0

    async def operations(self, _: str) -> None:
        state = await self._repository.read_async()
        await asyncio.to_thread(self._repository.commit, list(_past(state, time.time())))

    async def keys(self, _: str) -> None:
        now_s = time.time()
        await asyncio.to_thread(self._forget_keys, now_s)
        self.keys_seen_s = now_s

    def _forget_keys(self, now_s: float) -> None:
        gone = chain(self._old_keys(now_s), self._old_pasts(now_s))
        while some := list(islice(gone, FORGET_AT_ONCE)):
            self._repository.commit(some)

    def _old_keys(self, now_s: float) -> Iterator[Delete]:
        for key in self._repository.each(IdempotencyKey):
            if expired(key.record, now_s):
                yield Delete(IdempotencyKey, key.record.key, key.version)

    def _old_pasts(self, now_s: float) -> Iterator[Delete]:
        for past in self._repository.each(PastOperation):
            if expired(past.record.operation, now_s):
                yield Delete(PastOperation, past.record.id, past.version)


def _past(state: State, now_s: float) -> Iterator[Change]:
    """Changes that forget old operations. While its key lasts, a client that repeats the request of a
    forgotten operation learns how it ended, without its events."""
    for name in old_operations(state)[:FORGET_AT_ONCE]:
        old = state.operations[name]
        yield Delete(Operation, name, old.version)
        if not expired(old.record, now_s):
            yield Put(PastOperation(name, replace(old.record, events=())), None)
