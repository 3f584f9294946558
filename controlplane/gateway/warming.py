"""Compiles the routing code in a thread, once in a process, so that no request waits for it.

The first start on a machine compiles (a minute on a slow machine); later starts read what it stored.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from controlplane.routing.bookkeeping import set_usable
from controlplane.routing.snapshot import new_snapshot
from controlplane.traffic.base_router import PLACE_EVERY_S, BaseRouter, RoutingRules
from controlplane.traffic.live_snapshot import equal_rows
from controlplane.traffic.member import Member
from controlplane.traffic.request import InferenceRequest
from controlplane.traffic.request_terms import RequestTerms
from profiler import compiled
from profiler.compiled import Records
from workers.group import jobs
from workers.messages import WorkerLoad

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 300.0  # for another process that compiles; several times the duration of a compilation

_ready = threading.Event()


@cache
def begin() -> threading.Thread:
    """Start the thread, unless it was started."""
    thread = threading.Thread(target=_warm, name="compile-routing", daemon=True)
    thread.start()
    return thread


def is_ready() -> bool:
    return _ready.is_set()


@dataclass(frozen=True)
class _Models:
    models: Records
    variants: Records
    model_of_group: Mapping[str, int]
    variant_rows: Mapping[int, int]


def _warm() -> None:
    begun_s = time.perf_counter()
    try:
        with one_at_a_time():
            run_through()
    except Exception:  # without the policies, requests go to the worker with the fewest requests
        log.exception(
            "the routing policies could not be compiled; requests go to the group with the fewest requests"
        )
        return
    log.info("the routing policies were ready after %.1f s", time.perf_counter() - begun_s)
    _ready.set()


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let one process of a node compile: gateways that start together would compile the same code. The other
    processes then read the stored code. If the lock is unavailable, each process compiles by itself."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, jobs.FolderBusy):
            folder = compiled.folder()
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(jobs.alone(folder, LONGEST_WAIT_S))
        yield


def run_through() -> None:
    """Make every call of compiled code that a router makes, with the same argument types."""
    models = equal_rows()
    router = BaseRouter(RoutingRules(), 0.0)
    member = Member("base", 8)
    router.set_members([member])
    routed = router.send(InferenceRequest(RequestTerms(tpot_s=1.0), streams=True), 0.0)
    assert routed is not None
    router.learn(_Models(models, new_snapshot(0, 2, models).variants, {"base": 0}, {1: 1}))
    for ongoing in (2, 3, 1):
        router.loaded(member, WorkerLoad(ongoing, ongoing, 0, 0.0, 1, 0.1, 0, 0.0, ((1, "device"),)), 1.0)
    router.filled(routed)
    router.ended(routed, 1)
    router.tick(PLACE_EVERY_S + 1.0)
    assert router.snapshot is not None
    set_usable(router.snapshot, 0, True)  # called where there are many workers
