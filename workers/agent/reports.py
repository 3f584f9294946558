"""An agent's reports of its node. One frozen dataclass per message, as in `workers.messages`."""

from __future__ import annotations

from dataclasses import dataclass

from workers.messages import NodeReport


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of a device that one process has taken.

    `holder` is the worker group of the process, or `measuring:KEY` for an engine that measures the profile of
    this key. "": no engine of ours. None: the process is not visible from here (NVML also counts processes of
    other PID namespaces).
    """

    pid: int
    memory_bytes: int
    holder: str | None


@dataclass(frozen=True)
class DeviceSample:
    """One device now. `utilisation` is 0 to 1, one sample a second, oldest first, the newest last.

    NVLink joins the GPUs with the same `nvlink_domain`. `cores` are a CPU's, 0 for a GPU. `work` has, by
    holder, the share of the samples' time in which each of our processes kept the device busy; other
    processes are not included.
    """

    index: int
    kind: str
    total_bytes: int
    used_bytes: int
    utilisation: tuple[float, ...]
    processes: tuple[ProcessMemory, ...]
    nvlink_domain: int = 0
    cores: float = 0.0
    work: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class AgentReport:
    """The last sample, taken `age_s` ago, and the error if there should be a newer one.

    `rates` are the measured rates of the devices, once the agent knows them.
    """

    pid: int
    devices: tuple[DeviceSample, ...]
    age_s: float
    problem: str = ""
    rates: NodeReport | None = None


@dataclass(frozen=True)
class AgentOptions:
    """`gpus` are the indices of the GPUs to report; None: those that CUDA_VISIBLE_DEVICES leaves.

    The agent keeps the last `window` samples.
    """

    gpus: tuple[int, ...] | None
    window: int
    every_s: float = 1.0
