"""The book of reports when Ray, or an agent, does not answer: no caller waits for it long."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from controlplane.cluster.inventory import Timeouts
from controlplane.runtime import node_agents
from controlplane.runtime.node_agents import AgentBook
from controlplane.settings import Settings
from testkit.controlplane.fake_ray import RATES, REPORT, Actor, FakeRay, in_its_place, node, until
from workers.agent.reports import AgentReport
from workers.messages import NodeReport


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    fake = FakeRay()
    in_its_place(fake, monkeypatch)
    yield fake
    fake.released.set()


@pytest.fixture
def book() -> AgentBook:
    return AgentBook(Settings(), starts=False, timeouts=Timeouts(2, 4))


@pytest.mark.timeout(300)
async def test_a_cluster_that_does_not_answer_delays_no_caller(ray: FakeRay, book: AgentBook) -> None:
    ray.hung = True  # until the last line: a call that waited for Ray's answer would not return
    assert await book.nodes(wait=False) == ()
    assert await book.nodes() == ()
    ray.released.set()  # the loop ends when its threads do


async def test_a_node_that_hangs_holds_no_other_up(ray: FakeRay, book: AgentBook) -> None:
    ray.found = [node("a"), node("b")]
    ray.actors = {"agent-id-a": Actor(), "agent-id-b": Actor()}
    ray.actors["agent-id-b"].hung = True
    seen: dict[str, str] = {}
    async with asyncio.timeout(60):
        while seen.get("a") != "" or "did not answer" not in seen["b"]:
            seen = {n.name: n.problem for n in await book.nodes()}
    assert seen["b"].startswith("node b has not reported yet")
    assert "the node's agent did not answer within" in seen["b"]
    ray.actors["agent-id-b"].hung = False
    await until(book, lambda n: not n.problem)


async def test_new_nodes_are_waited_for(
    ray: FakeRay, book: AgentBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_agents, "FIRST_WORD_S", 60)
    ray.found = [node("a")]
    waiting = asyncio.create_task(book.nodes())
    await asyncio.sleep(0.05)
    ray.actors = {"agent-id-a": Actor()}
    (found,) = await waiting
    assert (found.problem, found.agent_pid) == ("", 7)


async def test_measured_rates_are_handed_to_the_next_agent(ray: FakeRay, book: AgentBook) -> None:
    ray.found, ray.actors = [node("a")], {"agent-id-a": (actor := Actor())}
    await book.nodes()
    actor.answer = AgentReport(8, REPORT.devices, 0.0)  # as another one says it, which knows no rates
    (found,) = await until(book, lambda n: n.agent_pid == 8)
    assert found.problem == ""
    assert found.devices[0].rates.flops_per_s == 1e11
    assert actor.told[0] == RATES


async def test_a_node_that_died_is_gone(ray: FakeRay, book: AgentBook) -> None:
    ray.found, ray.actors = [node("a")], {"agent-id-a": Actor()}
    await book.nodes()
    ray.found = [node("a", alive=False)]
    (found,) = await until(book, lambda n: n.lost)
    assert found.problem.startswith("node a is gone")


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (ValueError("no such device"), "ValueError: no such device"),
        (TimeoutError(), f"no answer within {node_agents.PROBE_TIMEOUT_S:.0f} s"),
    ],
)
async def test_the_reason_for_unmeasured_devices_is_reported_until_they_are_measured(
    ray: FakeRay, failure: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.found, ray.actors = [node("a")], {"agent-id-a": Actor(replace(REPORT, rates=None))}
    outcomes: list[Exception] = [failure]

    async def measured(*of: object) -> NodeReport:
        if outcomes:
            raise outcomes.pop()
        await going_on.wait()
        return RATES

    going_on, task = asyncio.Event(), SimpleNamespace(remote=measured)
    monkeypatch.setattr(ray, "remote", lambda **o: lambda f: SimpleNamespace(options=lambda **o: task), False)
    monkeypatch.setattr(ray, "cancel", lambda task, force: None, raising=False)
    monkeypatch.setattr(node_agents, "NodeAffinitySchedulingStrategy", lambda **on: None)
    monkeypatch.setattr(AgentBook, "_agent", lambda self, found: ray.get_actor(f"agent-{found.id}", ""))
    book = AgentBook(Settings(), starts=True, timeouts=Timeouts(30, 60))
    (found,) = await until(book, lambda n: "could not be measured" in n.problem)
    assert found.problem == f"the devices of node a could not be measured yet: {told}"
    assert not found.awaited
    going_on.set()
    await until(book, lambda n: bool(n.devices) and not n.problem)


def test_nodes_are_called_as_they_were_started() -> None:
    assert node_agents.node_name(node("host")) == "host"
    assert node_agents.node_name({**node("host"), "NodeName": "rack-1"}) == "rack-1"


async def test_a_book_that_was_not_asked_for_long_waits_for_slow_answers(
    ray: FakeRay, book: AgentBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway's: what it heard last is old because it did not ask."""
    monkeypatch.setattr(node_agents, "ASK_TIMEOUT_S", 5.0)
    ray.found, ray.actors = [node("a")], {"agent-id-a": (actor := Actor())}
    (found,) = await book.nodes()
    assert not found.problem
    book._looked_s -= 60.0
    book._nodes["id-a"].sampled_s -= 60.0
    actor.hung = True
    asked = asyncio.create_task(book.nodes(wait=False))
    await asyncio.sleep(4 * node_agents.PROMPT_S)
    assert not asked.done()
    actor.answered.set()
    (found,) = await asked
    assert (found.problem, found.lost) == ("", False)


async def test_a_node_for_no_engines_is_none_of_ours(ray: FakeRay, book: AgentBook) -> None:
    """The chart's head: `--num-cpus=0`. Ray leaves out what a node has none of."""
    ray.found = [node("head", memory=4e9), node("cpus", CPU=4.0), node("gpus", GPU=8.0)]
    ray.actors = {f"agent-id-{name}": Actor() for name in ("head", "cpus", "gpus")}
    await until(book, lambda n: not n.problem)
    assert {n.name for n in await book.nodes()} == {"cpus", "gpus"}
