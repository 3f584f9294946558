"""The state of a rank's device, read on the rank's own node without a CUDA context."""

from __future__ import annotations

import contextlib

from profiler.types import CPU
from workers.agent import host
from workers.agent.gpus import Nvml
from workers.agent.reports import DeviceSample
from workers.agent.sampling import gpu_samples, host_sample
from workers.messages import RankConfig


def look(rank: RankConfig) -> DeviceSample:
    """The state of a rank's device. Errors: pynvml.NVMLError, ValueError for a missing GPU."""
    if rank.device_kind == CPU:
        return host_sample(host.read(), host.processes(), host.memory_of, ())
    with contextlib.closing(Nvml([rank.device_index])) as driver:
        (sample,) = gpu_samples(driver.read(), driver.linked, host.processes(), {})
    return sample


def held_by(pid: int, sample: DeviceSample) -> int | None:
    """A process's memory on a GPU; None if the driver does not list the process, as in some containers."""
    return next((p.memory_bytes for p in sample.processes if p.pid == pid), None)
