"""One host as `benchmarks.chosen_sizes` has it: its devices by the agent, its engines in processes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from benchmarks.chosen_sizes.serve import END_S, Order
from controlplane.cluster.inventory import NodeContact, NodeState, Timeouts, inventory_of, node_states
from controlplane.settings import Settings, gpus_of
from placement.solver.cluster import LOAD_WINDOW
from placement.types import Inventory
from workers.agent.agent import Agent
from workers.agent.reports import AgentOptions, AgentReport
from workers.group import processes
from workers.group.jobs import last_words
from workers.messages import EngineConfig, NodeReport, VariantRef, WorkerReport

PROCESSES = "benchmarks.chosen_sizes.serve"
PROBE_S, SAMPLE_S, START_S = 180.0, 15.0, 900.0
# Engines choose ports long before they use them: each from a range of its own, below the ephemeral ones.
FIRST_PORT, PORTS = 12_000, 100


class Child:
    """A process that answers in JSON lines, in a session of its own; it ends with its standard input."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self._name, self._process, self._log = name, process, log

    async def hear(self, within_s: float) -> dict[str, Any]:
        """Its next answer. Raises RuntimeError when there is none, or when it reports a problem."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(within_s):
                line = await self._process.stdout.readline()
        except TimeoutError as e:
            raise RuntimeError(self._with_log_tail(f"said nothing for {within_s:.0f} s")) from e
        if not line:
            status = await asyncio.wait_for(self._process.wait(), END_S)
            raise RuntimeError(self._with_log_tail(f"ended with status {status}"))
        answer: dict[str, Any] = json.loads(line)
        if "problem" in answer:
            raise RuntimeError(self._with_log_tail(f"failed: {answer['problem']}"))
        return answer

    async def ask(self, order: Order, within_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(dataclasses.asdict(order)).encode() + b"\n")
        await self._process.stdin.drain()
        return await self.hear(within_s)

    async def end(self) -> list[int]:
        """In order if it does so in time; the pids of what had to be killed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._process.wait()
        left = processes.in_session(self._process.pid)
        await asyncio.to_thread(processes.end_session, self._process.pid)
        await self._process.wait()
        return left

    def _with_log_tail(self, what: str) -> str:
        return f"{self._name} {what}; its log {self._log} ends: {last_words(self._log)}"


class Children:
    """All processes that were started; their logs are in a folder."""

    def __init__(self, logs: Path) -> None:
        self._logs, self._all = logs, list[Child]()
        logs.mkdir(parents=True, exist_ok=True)

    async def start(self, name: str, *arguments: str) -> Child:
        log = self._logs / f"{name}.log"
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", PROCESSES, *arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=file,
                start_new_session=True,
                env={**os.environ, "VLLM_PORT": str(FIRST_PORT + PORTS * len(self._all))},
            )
        self._all.append(Child(name, process, log))
        return self._all[-1]

    async def end_all(self) -> list[int]:
        """The pids of what had to be killed."""
        return sum(await asyncio.gather(*(child.end() for child in self._all)), start=list[int]())


async def rates_of(node: str, children: Children) -> NodeReport:
    """Measured in a process of its own, as the control plane does: CUDA's context goes with it."""
    child = await children.start("probe", "probe", node)
    return TypeAdapter(NodeReport).validate_python(await child.hear(PROBE_S))


class Host:
    """The part of `EngineControl` that `GroupActions` needs, for one host without Ray.

    `seen` is the last inventory. Weights of engines are made up.
    """

    def __init__(self, settings: Settings, rates: NodeReport, children: Children, work: Path) -> None:
        self._settings, self._rates, self._children, self._work = settings, rates, children, work
        self._agent = Agent(AgentOptions(gpus_of(settings.gpus, rates.node), LOAD_WINDOW))
        self._agent.remember(rates)
        self._engines: dict[str, Child] = {}
        self._reports: dict[str, WorkerReport] = {}
        self.seen = Inventory(())

    async def sample(self) -> AgentReport:
        """One that is begun now. Raises RuntimeError when none comes."""
        asked_s = time.monotonic()
        while (waited_s := time.monotonic() - asked_s) < SAMPLE_S:
            report = self._agent.report()
            if report.devices and report.age_s < waited_s:
                return report
            await asyncio.sleep(0.1)
        raise RuntimeError(f"the devices are not sampled: {self._agent.report().problem or 'no answer'}")

    async def inventory(self) -> Inventory:
        await self.sample()
        self.seen = inventory_of(await self.nodes())
        return self.seen

    async def nodes(self, wait: bool = True) -> tuple[NodeState, ...]:
        report = self._agent.report()
        contact = NodeContact(self._rates.node, True, report.age_s, report, report.problem, id="this-host")
        return node_states([contact], Timeouts())

    async def launch(self, config: EngineConfig) -> None:
        path = self._work / f"{config.group_name}.json"
        dummy = dataclasses.replace(config, load_format="dummy")
        path.write_bytes(TypeAdapter(EngineConfig).dump_json(dummy, indent=1))
        self._engines[config.group_name] = await self._children.start(config.group_name, "engine", str(path))

    async def started(self, group: str) -> float:
        """Wait until the engine runs; the seconds its start took. Raises RuntimeError."""
        told = await self._engines[group].hear(START_S)
        self._reports[group] = TypeAdapter(WorkerReport).validate_python(told["report"])
        return float(told["start_s"])

    async def measure(self, group: str, order: Order) -> dict[str, Any]:
        return await self._engines[group].ask(order, self._settings.request_timeout_s)

    async def reports(self, group: str) -> list[WorkerReport]:
        return [self._reports[group]] if group in self._reports else []

    async def stop(self, group: str) -> None:
        await self._engines.pop(group).end()

    async def load_variant(self, group: str, variant: VariantRef) -> None:
        raise NotImplementedError("no variants are served here")

    async def unload_variant(self, group: str, variant: VariantRef) -> None:
        raise NotImplementedError("no variants are served here")
