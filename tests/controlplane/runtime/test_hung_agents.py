"""Agents that hang: another is there before their node counts as lost, whenever this controller started."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from controlplane.cluster.inventory import Timeouts
from controlplane.runtime import node_agents
from controlplane.runtime.node_agents import AgentBook
from controlplane.settings import Settings
from testkit.controlplane.fake_ray import Actor, FakeRay, in_its_place, node, until

LOST_S = 6.0


class Clock:
    """Advances at every reading: this process may stand still for any time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 0.01
        return self.now_s


class StartingRay(FakeRay):
    """Ray starts a killed agent again: the new one hangs too while `broken`."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.kills: list[float] = []
        self.broken = False

    def kill(self, actor: Actor, no_restart: bool) -> None:
        assert not no_restart
        self.kills.append(self.clock.now_s)
        actor.hung = self.broken

    def remote(self, cls: type) -> Any:
        return SimpleNamespace(options=lambda name, **_: SimpleNamespace(remote=lambda *_: self.actors[name]))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[StartingRay]:
    fake = StartingRay()
    fake.found, fake.actors = [node("a")], {"agent-id-a": Actor()}
    in_its_place(fake, monkeypatch)
    monkeypatch.setattr(node_agents, "NodeAffinitySchedulingStrategy", SimpleNamespace)
    monkeypatch.setattr(node_agents, "time", fake.clock)
    yield fake
    fake.released.set()


@pytest.fixture
def book() -> AgentBook:
    return AgentBook(Settings(), timeouts=Timeouts(2, LOST_S), starts=True)


@pytest.mark.parametrize("heard", [True, False], ids=["heard before", "hung since the controller started"])
async def test_a_hanging_agent_is_replaced_before_its_node_is_lost(
    ray: StartingRay, book: AgentBook, heard: bool
) -> None:
    actor = ray.actors["agent-id-a"]
    actor.hung = not heard
    began_s = ray.clock.now_s
    await book.nodes(wait=False)
    actor.hung = True
    seen_lost = False
    async with asyncio.timeout(300):
        while not ray.kills or (await book.nodes(wait=False))[0].problem:
            seen_lost |= (await book.nodes(wait=False))[0].lost
            await asyncio.sleep(0.01)
    assert not seen_lost
    assert len(ray.kills) == 1
    assert LOST_S / 2 <= ray.kills[0] - began_s < LOST_S


async def test_a_slowly_starting_agent_gets_more_time_each_attempt(ray: StartingRay, book: AgentBook) -> None:
    ray.broken = ray.actors["agent-id-a"].hung = True
    async with asyncio.timeout(300):
        while len(ray.kills) < 3:
            await book.nodes(wait=False)
            await asyncio.sleep(0.01)
    first, second = (b - a for a, b in pairwise(ray.kills))
    assert second > 1.5 * first > 1.5 * LOST_S / 2
    ray.actors["agent-id-a"].hung = False
    await until(book, lambda n: not n.problem)


async def test_readers_replace_none(ray: StartingRay) -> None:
    ray.actors["agent-id-a"].hung = True
    reader = AgentBook(Settings(), timeouts=Timeouts(2, LOST_S), starts=False)
    await until(reader, lambda n: n.lost and not n.gone)
    assert not ray.kills


async def test_agents_report_ray_s_node_ids(ray: StartingRay, book: AgentBook) -> None:
    (found,) = await until(book, lambda n: not n.problem)
    assert (found.ids, found.gone) == (("id-a",), False)
    ray.found = [node("a", alive=False), {**node("a"), "NodeID": "id-b"}]
    ray.actors["agent-id-b"] = Actor()
    (again,) = await until(book, lambda n: not n.problem and n.ids == ("id-b",))
    assert not again.gone
    ray.found = [node("a", alive=False)]
    await until(book, lambda n: n.gone and n.lost and n.ids == ())
