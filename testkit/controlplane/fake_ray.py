"""Ray and its agents as the book of reports sees them, with calls that hang."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from controlplane.cluster.inventory import NodeState
from controlplane.runtime import node_agents
from controlplane.runtime.node_agents import AgentBook
from workers.agent.reports import AgentReport, DeviceSample
from workers.messages import DeviceReport, NodeReport

RATES = NodeReport("a", (DeviceReport(0, "cpu", 1e10, 1e11),))
REPORT = AgentReport(7, (DeviceSample(0, "cpu", 100, 40, (0.5,), ()),), 0.1, rates=RATES)


class Actor:
    """An agent's handle; it answers while it is not `hung`, and returns its reports."""

    def __init__(self, report: AgentReport = REPORT) -> None:
        self.answer, self.hung = report, False
        self.answered = asyncio.Event()  # ends the wait of those that asked while it hung
        self.told: list[NodeReport] = []
        self.report = SimpleNamespace(remote=self._report)
        self.remember = SimpleNamespace(remote=self.told.append)

    async def _report(self) -> AgentReport:
        if self.hung:
            await self.answered.wait()
        return self.answer


class FakeRay:
    """The calls that the book makes to Ray."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        self.actors: dict[str, Actor] = {}
        self.released = threading.Event()
        self.hung = False

    def nodes(self) -> list[dict[str, Any]]:
        if self.hung:
            self.released.wait()
        return self.found

    def get_actor(self, name: str, namespace: str) -> Actor:
        if name not in self.actors:
            raise ValueError(name)
        return self.actors[name]


def node(name: str, alive: bool = True, **resources: float) -> dict[str, Any]:
    where = {"NodeManagerAddress": "10.0.0.1", "NodeManagerHostname": name, "NodeName": "10.0.0.1"}
    return {"NodeID": f"id-{name}", "Alive": alive, "Resources": resources or {"CPU": 2.0}, **where}


def in_its_place(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the book call `fake` instead of Ray, and wait a hundredth of the time for its answers."""
    monkeypatch.setattr(node_agents, "ray", fake)
    monkeypatch.setattr(node_agents, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(node_agents, "PROMPT_S", 0.05)
    monkeypatch.setattr(node_agents, "ASK_TIMEOUT_S", 0.1)
    monkeypatch.setattr(node_agents, "FIRST_WORD_S", 0.3)


async def until(book: AgentBook, holds: Callable[[NodeState], bool]) -> tuple[NodeState, ...]:
    """All nodes, once the condition holds for each."""
    async with asyncio.timeout(60):
        while not all(map(holds, found := await book.nodes(wait=False))):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found
