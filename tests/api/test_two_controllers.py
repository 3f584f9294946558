"""A second controller on the store of an installation that serves, as in a cluster that is to replace it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from controlplane.controller import leadership as leadership_module
from controlplane.controller.controller import Controller
from controlplane.controller.leadership import Leadership
from controlplane.controller.metrics import ControllerMetrics
from controlplane.state.base import StateStore
from controlplane.state.repository import Repository
from testkit.api.installations import Installation, wait_for
from testkit.in_memory import InMemoryCluster


class Newcomer:
    """The controller of another cluster, in which nothing runs yet."""

    def __init__(self, beside: Installation) -> None:
        self.cluster = InMemoryCluster()
        self.acts: list[bool] = []
        self._beside = beside

    def _make(self, store: StateStore) -> Controller:
        metrics = ControllerMetrics(CollectorRegistry())
        return Controller(self._beside.settings, Repository(store), self.cluster, metrics)

    async def _main(self) -> None:
        leadership = Leadership(self._beside.store, self._make, self.acts.append)
        self._loop, self._task = asyncio.get_running_loop(), asyncio.create_task(leadership.run())
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        thread.start()
        wait_for(lambda: self.acts)
        yield
        self._loop.call_soon_threadsafe(self._task.cancel)
        thread.join(60)
        assert not thread.is_alive()


def test_a_second_controller_stands_by_until_the_first_ends(
    served: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leadership_module, "TRY_S", 0.01)
    engines, other = dict(served.cluster.engines), Newcomer(served)
    with other.running():
        for number in range(100):
            name = ("base", "v1")[number % 2]
            reply = served.post("/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1})
            assert reply.status_code == 200
        assert served.register("v2", "base")["phase"] == "Ready"  # by the first
        assert other.acts == [False]
        assert served.cluster.engines == engines
        assert other.cluster.engines == {}
        served.loop.call_soon_threadsafe(served.controlling.cancel)
        wait_for(lambda: other.acts == [False, True])
        # Where it acts nothing serves: it starts the engine there, and stops none of the other's.
        wait_for(lambda: set(other.cluster.engines) == set(engines))
        assert served.cluster.engines == engines
