"""Many records and many watchers: the cost of the management API and of a request with them."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterable
from contextlib import ExitStack, closing
from itertools import islice
from typing import Any

import aiohttp

from benchmarks.hardening.probing import Probe, waiting_for
from benchmarks.live.groups import BASE, Running
from controlplane.planning.reconcile import KEEP_OPERATIONS
from controlplane.state.records import IdempotencyKey, Operation, OperationEvent, OperationKind, Phase
from controlplane.state.repository import Put, Repository
from controlplane.state.stores import open_store

OPEN = 10  # operations that are watched, and never end
AT_ONCE = 1_000  # records of a commit
KEPT = KEEP_OPERATIONS + OPEN
SETTLED_S = 240.0


def measure(running: Running, store_url: str, records: int, watchers: int, seconds: float) -> dict[str, Any]:
    """Costs before; then with `records` operations with a key each; then with watchers as well, while the
    controller forgets old operations and afterwards."""
    with closing(open_store(store_url)) as store:
        repository = Repository(store)
        alone = _asked(running, seconds)
        began_s = time.monotonic()
        old = iter(_old(records))
        while some := [Put(record, 0) for record in islice(old, AT_ONCE)]:
            repository.commit(some)
        written_s = time.monotonic() - began_s
        crowded = _asked(running, seconds)
        told, watched = _with_watchers(running, repository, range(OPEN), watchers, seconds)
        left = len(repository.read().operations)
        settled_s = waiting_for(lambda: len(repository.read().operations) <= KEPT, SETTLED_S, 1.0)
        keys = sum(1 for _ in repository.each(IdempotencyKey))
        others = range(OPEN, 2 * OPEN)  # a gateway may still hold that the first ones have ended
        told_then, settled = _with_watchers(running, repository, others, watchers, seconds)
    return {
        "records": 2 * records,
        "watchers": watchers,
        "written_s": round(written_s, 1),
        "alone": alone,
        "beside_records": crowded,
        "beside_records_and_watchers": watched,
        "watchers_told": told + told_then,
        "operations_left": left,
        "forgotten_after_s": settled_s,
        "keys_left": keys,
        "beside_keys_and_watchers": settled,
    }


def _with_watchers(
    running: Running, repository: Repository, watched: range, watchers: int, seconds: float
) -> tuple[int, dict[str, Any]]:
    repository.commit([Put(_open(number), None) for number in watched])
    return asyncio.run(_watched(running, repository, watched, watchers, seconds))


def _asked(running: Running, seconds: float) -> dict[str, Any]:
    url, headers = running.cluster.url, running.headers
    completion = {"model": BASE, "prompt": "w1 w2", "max_tokens": 2}
    calls = {
        "management": Probe(url, ("GET", f"/deployments/{BASE}", None), headers=headers),
        "inference": Probe(url, ("POST", "/v1/completions", completion), headers=headers),
    }
    with ExitStack() as asking:
        for probe in calls.values():
            asking.enter_context(probe)
        time.sleep(seconds)
    return {name: probe.summary() for name, probe in calls.items()}


async def _watched(
    running: Running, repository: Repository, watched: range, watchers: int, seconds: float
) -> tuple[int, dict[str, Any]]:
    """Each watcher must be told of the change that is made at the end."""
    ready, changed = asyncio.Semaphore(0), 0

    async def watch(http: aiohttp.ClientSession, number: int) -> None:
        nonlocal changed
        path = f"/operations/{_open(watched[number % len(watched)]).id}/watch"
        async with http.get(running.cluster.url + path, headers=running.headers) as reply:
            assert reply.status == 200, await reply.text()
            seen = 0
            async for line in reply.content:
                if line.startswith(b"data: "):
                    seen += 1
                    ready.release()
                if seen == 2:
                    changed += 1
                    return

    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        tasks = [asyncio.create_task(watch(http, number)) for number in range(watchers)]
        for _ in tasks:
            await asyncio.wait_for(ready.acquire(), 120)
        found = await asyncio.to_thread(_asked, running, seconds)
        await asyncio.to_thread(
            lambda: repository.commit([Put(_open(n, Phase.CANCELLED), None) for n in watched])
        )
        _, late = await asyncio.wait(tasks, timeout=60)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return changed, found


def _old(count: int) -> Iterable[Operation | IdempotencyKey]:
    """As after many registrations of an hour ago."""
    now_s = time.time() - 3600
    for number in range(count):
        events = tuple(OperationEvent(now_s, Phase.READY, "it is there") for _ in range(3))
        name = f"op-old{number:09d}"
        yield Operation(
            name,
            OperationKind.REGISTER,
            f"gone{number}",
            Phase.READY,
            created_at_s=now_s,
            updated_at_s=now_s + number * 1e-3,
            events=events,
        )
        digest = hashlib.sha256(name.encode()).hexdigest()
        yield IdempotencyKey(f"key-{number:09d}", digest, name, time.time())


def _open(number: int, phase: Phase = Phase.PENDING) -> Operation:
    """Operations of now: the oldest finished ones are forgotten first, perhaps before a gateway has seen
    their end."""
    now_s = time.time()
    name = f"op-open{number}"
    return Operation(
        name,
        OperationKind.REGISTER,
        f"nobody{number}",
        phase,
        created_at_s=now_s,
        updated_at_s=now_s,
    )
