"""One agent per node, for as long as the node lives: it samples in a thread and answers at once."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pynvml

from workers.agent import host
from workers.agent.gpus import Nvml, gpu_count
from workers.agent.reports import AgentOptions, AgentReport, DeviceSample
from workers.agent.sampling import ProcessRow, cpu_work, gpu_samples, gpu_work, host_sample, mean_work
from workers.messages import NodeReport

log = logging.getLogger(__name__)


class Agent:
    """The agent. If sampling fails, the last sample stays, and `report` has its age."""

    def __init__(self, options: AgentOptions) -> None:
        self._options = options
        self._nvml: Nvml | None = None
        self._history: dict[int, deque[float]] = {}
        self._work: dict[int, deque[Mapping[str, float]]] = {}
        self._cpu_before: tuple[float, Mapping[int, float]] = (0.0, {})
        self._devices: tuple[DeviceSample, ...] = ()
        self._sampled_s = time.monotonic()
        self._problem = ""
        self._rates: NodeReport | None = None
        threading.Thread(target=self._run, name="sampling", daemon=True).start()

    def report(self) -> AgentReport:
        age_s = time.monotonic() - self._sampled_s
        return AgentReport(os.getpid(), self._devices, age_s, self._problem, self._rates)

    def remember(self, rates: NodeReport) -> None:
        """Add these rates to every later report: they are measured once, and several components read them."""
        self._rates = rates

    def _run(self) -> None:
        while True:
            try:
                self.sample()
            except Exception as e:
                if not self._problem:
                    log.exception("the agent cannot sample the devices")
                self._problem = f"{type(e).__name__}: {e}"
                self._nvml = None
            time.sleep(self._options.every_s)

    def sample(self) -> None:
        """Take one sample. Errors: pynvml.NVMLError, OSError."""
        table = host.processes()
        devices = self._gpus(table) or (self._cpu(table),)
        for device in devices:
            self._history[device.index] = deque(device.utilisation, maxlen=self._options.window)
        keep = self._options.window
        self._devices = tuple(replace(d, utilisation=d.utilisation[-keep:]) for d in devices)
        self._sampled_s, self._problem = time.monotonic(), ""

    def _worked(self, index: int, work: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
        """The work by holder over the window, including this sample's `work`."""
        samples = self._work.setdefault(index, deque(maxlen=self._options.window))
        samples.append(work)
        return mean_work(samples)

    def _gpus(self, table: Mapping[int, ProcessRow]) -> Sequence[DeviceSample]:
        if self._nvml is None:
            if not gpu_count():
                return ()
            self._nvml = Nvml(self._options.gpus)
        try:
            readings = self._nvml.read()
        except pynvml.NVMLError:
            self._nvml.close()
            raise
        samples = gpu_samples(readings, self._nvml.linked, table, self._history)
        work = {reading.index: gpu_work(reading, table) for reading in readings}
        return [replace(s, work=self._worked(s.index, work[s.index])) for s in samples]

    def _cpu(self, table: Mapping[int, ProcessRow]) -> DeviceSample:
        now_s, (before_s, before) = time.monotonic(), self._cpu_before
        self._cpu_before = now_s, {pid: row.cpu_s for pid, row in table.items()}
        work = self._worked(0, cpu_work(before, table, now_s - before_s, os.cpu_count() or 1))
        return replace(host_sample(host.read(), table, host.memory_of, self._history.get(0, ())), work=work)
