"""Launches that are decided at the same time never get the same bytes: on real stores, in threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from controlplane.cluster import reservations
from controlplane.state import StateStore
from controlplane.state.records import Deployment, Phase
from controlplane.state.repository import Put, Repository
from controlplane.state.stores import open_store
from controlplane.state.transactions import persist
from controlplane.state.worker_groups import WorkerGroup
from placement.solver.from_inventory import clusters_of
from placement.solver.policies.joint import Joint
from placement.solver.request import Compression, ModelFigures, Request
from placement.types import Device, Intent, Inventory
from profiler.types import DeviceRates

pytestmark = pytest.mark.slow  # a real Redis

DEVICES = tuple(
    Device(node, index, "h200", 100, 100, DeviceRates(1e12, 1e14)) for node in "ab" for index in range(2)
)
ASKING = 24  # placements of 30 bytes: 12 fit into four devices of 100


def request(name: str) -> Request:
    """One rank of 30 bytes: 10 of each layer and 10 outside of layers."""
    figures = ModelFigures("m", 2, 1, 1, 0, 0, 1, 1.0, 10, (Compression("none", 1.0, 10, 0),))
    return Request(name, figures, concurrency=1, max_tp=1, max_pp=1)


def launch(url: str, name: str, together: threading.Barrier) -> bool:
    """Decide and commit as the controller does, from a connection of its own. Whether it fitted."""
    store = open_store(url)
    repository, fitted = Repository(store), [False]
    first_look = iter([True])

    def once() -> None:
        state = repository.read()
        sight = reservations.available(Inventory(DEVICES), state.ledgers, 0.0, exclude=name)
        (cluster,) = clusters_of(sight)
        outcome = Joint().find(cluster, request(name))
        if next(first_look, False):
            together.wait(30)  # all have decided, on the same sight
        fitted[0] = outcome is not None
        if outcome is None:
            return
        deployment = Deployment(
            name, 1, name, Phase.DEPLOYING, Intent.MIN_COST, 16, groups=(WorkerGroup(0, placement=outcome),)
        )
        repository.commit([Put(deployment, 0), *reservations.reserve(state, name, 1, outcome, 0.0)])

    try:
        persist(once)
    finally:
        store.close()
    return fitted[0]


def test_bytes_are_promised_once(url: str, store: StateStore) -> None:
    names = [f"m{n}" for n in range(ASKING)]
    together = threading.Barrier(ASKING)
    with ThreadPoolExecutor(ASKING) as pool:
        fitted = list(pool.map(lambda name: launch(url, name, together), names))
    state = Repository(store).read()
    promises = reservations.promised(state.ledgers)
    assert sum(fitted) == 12
    assert {key: sum(holders.values()) for key, holders in promises.items()} == {
        (d.node, d.kind, d.index): 90 for d in DEVICES
    }
    # The ledgers agree with the deployments.
    placed = {
        (name, r.node, r.device_index)
        for name, found in state.deployments.items()
        if found.record.placement
        for r in found.record.placement.ranks
    }
    assert placed == {(h, node, index) for (node, _, index), holders in promises.items() for h in holders}
    assert len(placed) == 12


def test_reservations_outlive_their_writer(url: str, store: StateStore) -> None:
    """A store that is opened again, as by the next controller, has them."""
    assert launch(url, "m", threading.Barrier(1))
    again = open_store(url)
    try:
        state = Repository(again).read()
    finally:
        again.close()
    (found,) = state.ledgers.values()
    (kept,) = found.record.reservations
    assert (kept.holder, kept.uid, kept.memory_bytes) == ("m", 1, 30)
    Repository(store).commit(reservations.release(state, "m"))
    assert Repository(store).read().ledgers == {}
