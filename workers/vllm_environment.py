"""What vLLM reads from the environment and nowhere else, and what some devices need of it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

LOOPBACK = "127.0.0.1"
MAX_SEQUENCES = 1024  # of one request, whatever gateways let through
V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
REGEX_LIMIT = "VLLM_REGEX_COMPILATION_TIMEOUT_S"
BINDING, UNBOUND = "VLLM_CPU_OMP_THREADS_BIND", "nobind"


def environment(
    layers_per_stage: Sequence[int], host_ip: str = LOOPBACK, on_gpus: bool = False
) -> dict[str, str | None]:
    """Of a process that starts an engine's ranks on the node at `host_ip`; None: not to be set."""
    is_pipeline = len(layers_per_stage) > 1
    return {
        **(_overlapping_stages(vllm_version()) if is_pipeline and on_gpus else {}),
        "VLLM_PP_LAYER_PARTITION": ",".join(map(str, layers_per_stage)) if is_pipeline else None,
        START_METHOD: "spawn",  # a process with Ray's threads must not be forked
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_XGRAMMAR_CACHE_MB": "64",  # of 512: requests fill it
        REGEX_LIMIT: "0",  # by the clock; `workers.group.grammar_process` has limited the CPU time
        "VLLM_MAX_N_SEQUENCES": str(MAX_SEQUENCES),
        "VLLM_HOST_IP": host_ip,
        "HF_HUB_OFFLINE": "1",
        "TRITON_CACHE_DIR": triton_cache(),
        "VLLM_CPU_KVCACHE_SPACE": None,  # whole GiB, and it would overrule --kv-cache-memory-bytes
    }


def _overlapping_stages(engine: str) -> dict[str, str | None]:
    """vLLM 0.26 has mixtures of experts on its older model runner, which sends all sequences through a
    pipeline in one batch: one stage works, the others wait. 0.32 has all models on the newer one."""
    return {V2_RUNNER: os.environ.get(V2_RUNNER, "1")} if engine.startswith("0.26.") else {}


def vllm_version() -> str:
    """Of the vLLM that is installed here, under either name; empty without one. Does not import it."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return version(name)
    return ""


def triton_cache() -> str | None:
    """One for all engines of a node; None where nothing can be written. Torch would give each the folder of
    what was compiled for its own model; compiling vLLM's kernels anew takes 10 to 15 s on an H200's host."""
    if chosen := os.environ.get("TRITON_CACHE_DIR"):
        return chosen
    folder = Path(vllm_cache()) / "triton"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return str(folder) if os.access(folder, os.W_OK) else None


def vllm_cache() -> str:
    """Where vLLM keeps what it compiled, as it finds that itself."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.environ.get("VLLM_CACHE_ROOT") or f"{home}/vllm"


def cache_apart(name: str) -> str:
    """A folder in vLLM's cache for code of its own. What vLLM knows of classes of models is one for all: it
    finds that out in a process that imports all of torch, for 10 s."""
    cache, classes = Path(vllm_cache()), "modelinfos"
    folder = cache / name
    with suppress(OSError):  # then it finds out anew
        folder.mkdir(parents=True, exist_ok=True)
        (cache / classes).mkdir(exist_ok=True)
        (folder / classes).symlink_to(Path("..") / classes)
    return str(folder)


def put(variables: Mapping[str, str | None]) -> None:
    """Into this process's environment, which its children inherit."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def share_cores(ranks: int) -> None:
    """Have this many ranks on a CPU share the host's cores, with other engines too.

    vLLM would bind each rank to a NUMA node of its own, and refuse when there are fewer nodes; ranks of other
    engines would be bound to the same cores. Who sets VLLM_CPU_OMP_THREADS_BIND decides otherwise.
    """
    if os.environ.setdefault(BINDING, UNBOUND) == UNBOUND:
        os.environ["OMP_NUM_THREADS"] = str(threads(ranks, _cores()))


def threads(ranks: int, cores: int) -> int:
    """Threads of each rank where `ranks` share a host. One core is left for the scheduler and for HTTP, as by
    vLLM. With more threads than cores, ranks wait for each other by spinning."""
    return max(1, (cores - 1) // ranks)


def _cores() -> int:
    """Those this process may use, at most as many as there are physically."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, psutil.cpu_count(logical=False) or usable)


def fork_ranks() -> None:
    """Have vLLM fork its ranks from this process, which has imported what they need and has no thread that
    computes. A rank that starts anew takes 10 s of CPU and a quarter of a GiB more.

    vLLM does not fork a process that has been on a GPU. Threads are bound when a process starts, so ranks
    with bound threads start anew.
    """
    if os.environ.get(BINDING, UNBOUND) == UNBOUND:
        os.environ[START_METHOD] = "fork"


def set_environment(
    layers_per_stage: Sequence[int], tensor_parallel: int, kv_cache_bytes: int, on_gpus: bool
) -> None:
    """For an engine in this process whose ranks on a CPU have `kv_cache_bytes` each, in whole GiB."""
    put(environment(layers_per_stage, on_gpus=on_gpus))
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, math.ceil(kv_cache_bytes / 2**30)))
    if not on_gpus:
        share_cores(tensor_parallel * len(layers_per_stage))
