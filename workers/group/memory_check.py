"""Whether a rank finds its planned memory, and the error message if it does not: pure functions."""

from __future__ import annotations

from workers.agent.reports import DeviceSample, ProcessMemory
from workers.messages import RankConfig

GIB = 2**30
MAX_NAMED = 4


class NoMemory(RuntimeError):
    """A rank's device has less free memory than planned."""


def shortage(rank: RankConfig, sample: DeviceSample, own_bytes: int = 0) -> int:
    """The missing bytes; 0 if the plan fits. `own_bytes` of the used memory are already the rank's."""
    free = sample.total_bytes - sample.used_bytes
    return max(0, rank.memory_bytes - own_bytes - free)


def refusal(number: int, rank: RankConfig, sample: DeviceSample) -> str:
    """One sentence for the user: the planned memory, the free memory, and the holders of the rest."""
    free = sample.total_bytes - sample.used_bytes
    where = f" of {rank.node}" if rank.node else ""
    return (
        f"rank {number} needs {_gib(rank.memory_bytes)} GiB on {rank.device_kind} "
        f"{rank.device_index}{where}, but only {_gib(free)} of {_gib(sample.total_bytes)} GiB are free; "
        f"in use: {_users(sample)}"
    )


def _users(sample: DeviceSample) -> str:
    largest = sorted(sample.processes, key=lambda p: -p.memory_bytes)
    named = [f"{_gib(p.memory_bytes)} GiB by {_holder(p)}" for p in largest[:MAX_NAMED]]
    rest = sample.used_bytes - sum(p.memory_bytes for p in largest[:MAX_NAMED])
    if not named or rest > sample.total_bytes // 100:
        named.append(f"{_gib(max(0, rest))} GiB by processes that are not visible here")
    return ", ".join(named)


def _holder(process: ProcessMemory) -> str:
    match process.holder:
        case None | "":
            return f"process {process.pid}, which is not an engine of this cluster"
        case name:
            return f"process {process.pid} of the engine of '{name}'"


def _gib(count: int) -> str:
    return f"{count / GIB:.2f}"
