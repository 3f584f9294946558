"""The nodes' agents, as Ray actors: started, replaced, asked every second, and never blocking a caller.

An agent lives as long as its node. It reserves all the node's GPUs in Ray, so that Ray assigns them to
nothing else. A restarted controller finds the agent again by its name. Ray restarts a dead agent; if Ray does
not, the controller starts another.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from controlplane.cluster.inventory import TIMEOUTS, NodeContact, NodeState, Timeouts, node_states
from controlplane.planning.rescheduling import readable
from controlplane.settings import Settings, gpus_of
from placement.solver.cluster import LOAD_WINDOW
from workers.agent.agent import Agent
from workers.agent.reports import AgentOptions, AgentReport
from workers.messages import NodeReport

log = logging.getLogger(__name__)

NAMESPACE = "ostinato"
LOOK_EVERY_S = 1.0
PROMPT_S = 0.5  # a look does not wait for answers that take longer
IDLE_S = 5.0  # after this time without a look, the last answers do not tell which agents answer now
ASK_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 180.0
FIRST_WORD_S = 20.0  # the wait for a new node, until its agent has started and its devices are measured
KEEP_DEAD_S = 600.0
MAX_DOUBLINGS = 4  # of the time after which a silent agent is replaced


@dataclass
class _Node:
    """The known state of a living or dead Ray node."""

    id: str
    name: str
    gpus: float
    since_s: float
    alive: bool = True
    agent: Any = None
    report: AgentReport | None = None
    sampled_s: float = 0.0
    problem: str = ""
    rates: NodeReport | None = None
    unmeasured: str = ""  # why the measurement of its devices failed
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    replaced: int = 0  # how often its agent was replaced since the agent last answered
    replaced_s: float = 0.0

    def contact(self, now_s: float) -> NodeContact:
        silent_s = now_s - (self.sampled_s if self.report else self.since_s)
        return NodeContact(
            self.name,
            self.alive,
            max(0.0, silent_s),
            self.report,
            self.problem,
            self.id,
            self.unmeasured,
        )

    def is_new(self, now_s: float) -> bool:
        speaks = self.report is not None and self.report.rates is not None
        return self.alive and not speaks and now_s - self.since_s < FIRST_WORD_S


class AgentBook:
    """The latest report of every node. A book with `starts` also starts agents and has nodes measured;
    others only read."""

    def __init__(self, settings: Settings, starts: bool, timeouts: Timeouts = TIMEOUTS) -> None:
        self._settings = settings
        self._timeouts = timeouts
        self._starts = starts
        self._nodes: dict[str, _Node] = {}
        self._looking: asyncio.Task[None] | None = None
        self._looked_s = float("-inf")
        self._prompt_s = PROMPT_S

    async def keep(self) -> None:
        """Ask every second, until cancelled."""
        while True:
            await self._look_again()
            await asyncio.sleep(LOOK_EVERY_S)

    async def nodes(self, wait: bool = True) -> tuple[NodeState, ...]:
        """All nodes, with their last reports. `wait`: wait for the first nodes, and for new ones,
        FIRST_WORD_S at most."""
        began_s = time.monotonic()
        while True:
            await self._look_again()
            now_s = time.monotonic()
            if not wait or now_s - began_s > FIRST_WORD_S or not self._is_starting(now_s):
                break
            await asyncio.sleep(0.1)
        return node_states((node.contact(now_s) for node in self._nodes.values()), self._timeouts)

    def _is_starting(self, now_s: float) -> bool:
        return not self._nodes or any(node.is_new(now_s) for node in self._nodes.values())

    async def _look_again(self) -> None:
        """Look unless the last look is recent. Waits for a moment only, even if an agent hangs."""
        if self._looking is None or self._looking.done():
            since_s = time.monotonic() - self._looked_s
            if since_s < LOOK_EVERY_S * 0.9:
                return
            self._prompt_s = ASK_TIMEOUT_S if IDLE_S < since_s < math.inf else PROMPT_S
            self._looked_s = time.monotonic()
            self._looking = asyncio.create_task(self._look(self._prompt_s))
        await asyncio.wait({self._looking}, timeout=2 * self._prompt_s)

    async def _look(self, prompt_s: float) -> None:
        try:
            self._note_nodes(await asyncio.to_thread(ray.nodes))
        except Exception as e:  # not only RayError: a lost connection makes Ray raise any error
            log.warning("Ray does not list its nodes: %r", e)
        living = [node for node in self._nodes.values() if node.alive]
        for node in living:
            self._begin(node, "ask", self._ask)
            if self._starts and node.report and node.rates is None:
                self._begin(node, "probe", self._probe)
        if pending := [node.tasks["ask"] for node in living if "ask" in node.tasks]:
            await asyncio.wait(pending, timeout=prompt_s)

    def _note_nodes(self, listed: list[dict[str, Any]]) -> None:
        now_s = time.monotonic()
        alive = {n["NodeID"]: n for n in listed if n["Alive"] and _runs_engines(n["Resources"])}
        for node_id, seen in alive.items():
            if node_id not in self._nodes:
                gpus = float(seen["Resources"].get("GPU", 0))
                self._nodes[node_id] = _Node(node_id, node_name(seen), gpus, now_s)
        for node in list(self._nodes.values()):
            node.alive = node.id in alive
            if not node.alive and now_s - max(node.sampled_s, node.since_s) > KEEP_DEAD_S:
                del self._nodes[node.id]

    def _begin(self, node: _Node, what: str, work: Any) -> None:
        """Run `work` unless it still runs: a node that hangs gets one call at a time."""
        if what not in node.tasks:
            node.tasks[what] = task = asyncio.create_task(work(node))
            task.add_done_callback(lambda _: node.tasks.pop(what, None))

    async def _ask(self, node: _Node) -> None:
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                if node.agent is None:
                    node.agent = await asyncio.to_thread(self._agent, node)
                report: AgentReport = await node.agent.report.remote()
        except TimeoutError:
            node.problem = f"the node's agent did not answer within {ASK_TIMEOUT_S:.0f} s" + _who_has_gpus(
                node
            )
            self._replace_silent(node)
        except ValueError:  # no actor of this name
            node.agent, node.problem = None, "the node has no agent yet"
        except RayActorError as e:
            node.agent, node.problem = None, f"the node's agent is being replaced ({type(e).__name__})"
        except Exception as e:
            node.agent, node.problem = None, f"the node's agent did not answer: {e!r}"
            log.exception("asking the agent of %s failed", node.name)
        else:
            node.rates = report.rates or node.rates
            if report.rates is None and node.rates is not None:  # a new agent
                node.agent.remember.remote(node.rates)
            node.report = replace(report, rates=node.rates)
            node.sampled_s, node.problem = time.monotonic() - report.age_s, ""
            node.replaced = 0

    def _replace_silent(self, node: _Node) -> None:
        """Replace an agent that hangs, so that another reports before its node counts as lost.

        Each agent gets twice the time of the previous one: where agents start slowly, one must have enough
        time.
        """
        now_s = time.monotonic()
        silent_s = now_s - max(node.sampled_s, node.since_s, node.replaced_s)
        timeout_s = self._timeouts.lost_s / 2 * 2.0 ** min(node.replaced, MAX_DOUBLINGS)
        if self._starts and node.agent is not None and silent_s > timeout_s:
            log.warning(
                "the agent of %s has been silent for %.0f s: the controller replaces it", node.name, silent_s
            )
            node.replaced, node.replaced_s = node.replaced + 1, now_s
            ray.kill(node.agent, no_restart=False)

    def _agent(self, node: _Node) -> Any:
        """The node's agent. If there is none, a book that starts agents starts it. Blocking.

        Errors: ValueError when there is no agent.
        """
        name = f"agent-{node.id}"
        if not self._starts:
            return ray.get_actor(name, NAMESPACE)
        log.info("finding or starting the agent of %s", node.name)
        return (
            ray.remote(Agent)
            .options(
                name=name,
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=-1,
                max_concurrency=4,
                enable_task_events=False,  # Ray's GCS would keep 3 KB of each report
                num_cpus=0,
                num_gpus=node.gpus,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node.id, soft=False),
            )
            .remote(AgentOptions(gpus_of(self._settings.gpus, node.name), LOAD_WINDOW))
        )

    async def _probe(self, node: _Node) -> None:
        """Measure the devices' rates, once in a node's life: while engines run, the rates would be too
        low."""
        from workers.agent.device_rates import probe

        measured = None
        try:
            strategy = NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
            once = ray.remote(max_calls=1)(probe)  # else Ray keeps its process, which holds a GPU context
            task = once.options(num_cpus=0, scheduling_strategy=strategy)
            measured = task.remote(node.name, gpus_of(self._settings.gpus, node.name))
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                node.rates = await measured
            node.unmeasured = ""
        except Exception as e:  # any error: the caller that waits for this node must get it
            late = f"no answer within {PROBE_TIMEOUT_S:.0f} s"
            node.unmeasured = late if isinstance(e, TimeoutError) else readable(f"{type(e).__name__}: {e}")
            if measured is not None:
                ray.cancel(measured, force=True)
            log.warning("the devices of %s could not be measured, trying again: %r", node.name, e)
            await asyncio.sleep(ASK_TIMEOUT_S)


def _runs_engines(resources: dict[str, float]) -> bool:
    """Tell whether a node runs engines. A node with `--num-cpus=0` and no GPUs (the chart's head) does
    not, and needs no agent."""
    return any(resources.get(kind, 0.0) > 0 for kind in ("CPU", "GPU"))


def node_name(node: dict[str, Any]) -> str:
    """The name of a node of `ray.nodes()`: its --node-name, else its host."""
    name = str(node.get("NodeName") or "")
    return name if name and name != node["NodeManagerAddress"] else str(node["NodeManagerHostname"])


async def living_node_ids(names: Iterable[str]) -> dict[str, str]:
    """Ray's id of each living node among the named ones."""
    ids = {node_name(n): str(n["NodeID"]) for n in await asyncio.to_thread(ray.nodes) if n["Alive"]}
    return {name: ids[name] for name in names if name in ids}


def _who_has_gpus(node: _Node) -> str:
    if not node.gpus or node.report is not None:
        return ""
    return "; the agent needs all GPUs of the node, but another job of this Ray cluster may hold some"
