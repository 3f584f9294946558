"""vLLM's settings that exist only as environment variables, and what some devices need of them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

LOOPBACK = "127.0.0.1"
MAX_SEQUENCES = 1024  # of one request, whatever gateways allow
V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
TEMPLATE_LIMIT = "VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT"
REGEX_LIMIT = "VLLM_REGEX_COMPILATION_TIMEOUT_S"
BINDING, UNBOUND = "VLLM_CPU_OMP_THREADS_BIND", "nobind"
# What an engine's processes may keep of the memory that requests needed; a user can set other values.
KEPT_MEMORY = {
    # oneDNN compiles a product of matrices for each number of rows, and keeps 0.3 MiB of it. vLLM keeps 32
    # for each size of weights; by default oneDNN keeps 1,024 more.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    # A larger allocation goes back to the kernel when it is freed. By default glibc raises this limit to
    # 32 MiB; tensors of different sizes then leave holes in its heap.
    "MALLOC_MMAP_THRESHOLD_": str(4 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 20),  # free memory at the heap's end
    "MALLOC_ARENA_MAX": "2",  # by default eight for each core, each with holes of its own
}


def environment(
    layers_per_stage: Sequence[int], host_ip: str = LOOPBACK, on_gpus: bool = False
) -> dict[str, str | None]:
    """The environment of a process that starts an engine's ranks on the node at `host_ip`; None: must not be
    set.
    """
    is_pipeline = len(layers_per_stage) > 1
    return {
        **(_overlapping_stages(vllm_version()) if is_pipeline and on_gpus else {}),
        "VLLM_PP_LAYER_PARTITION": ",".join(map(str, layers_per_stage)) if is_pipeline else None,
        START_METHOD: "spawn",  # a process with Ray's threads must not be forked
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_XGRAMMAR_CACHE_MB": "64",  # instead of 512: requests fill it
        REGEX_LIMIT: "0",  # a wall-clock limit; `workers.group.grammar_process` has limited the CPU time
        TEMPLATE_LIMIT: "600",  # of the clock; `workers.engine.template_process` has limits of its own
        "VLLM_MAX_N_SEQUENCES": str(MAX_SEQUENCES),
        "VLLM_HOST_IP": host_ip,
        "HF_HUB_OFFLINE": "1",
        "TRITON_CACHE_DIR": triton_cache(),
        "VLLM_CPU_KVCACHE_SPACE": None,  # whole GiB, and it would overrule --kv-cache-memory-bytes
        **{name: os.environ.get(name, value) for name, value in KEPT_MEMORY.items()},
    }


def _overlapping_stages(engine: str) -> dict[str, str | None]:
    """The setting with which pipeline stages work at the same time.

    vLLM 0.26 runs mixtures of experts on its older model runner, which sends all sequences through a pipeline
    in one batch. So one stage works, and the others wait. 0.32 runs all models on the newer one.
    """
    return {V2_RUNNER: os.environ.get(V2_RUNNER, "1")} if engine.startswith("0.26.") else {}


def vllm_version() -> str:
    """The version of the installed vLLM, under either name; empty without one. Does not import it."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return version(name)
    return ""


def triton_cache() -> str | None:
    """One Triton cache for all engines of a node; None if it cannot be written.

    torch would give each engine a folder by its model. Compiling vLLM's kernels again takes 10 to 15 s on an
    H200's host.
    """
    if chosen := os.environ.get("TRITON_CACHE_DIR"):
        return chosen
    folder = Path(vllm_cache()) / "triton"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return str(folder) if os.access(folder, os.W_OK) else None


def vllm_cache() -> str:
    """vLLM's cache of compiled code, found as vLLM finds it."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.environ.get("VLLM_CACHE_ROOT") or f"{home}/vllm"


def cache_apart(name: str) -> str:
    """A separate folder in vLLM's cache for compiled code, which shares the cache of model classes.

    vLLM finds a model's class in a process that imports all of torch, for 10 s.
    """
    cache, classes = Path(vllm_cache()), "modelinfos"
    folder = cache / name
    with suppress(OSError):  # then vLLM finds the classes again
        folder.mkdir(parents=True, exist_ok=True)
        (cache / classes).mkdir(exist_ok=True)
        (folder / classes).symlink_to(Path("..") / classes)
    return str(folder)


def put(variables: Mapping[str, str | None]) -> None:
    """Set the variables in this process's environment, which its children inherit."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def share_cores(ranks: int) -> None:
    """Make `ranks` ranks on a CPU share the host's cores, also with other engines.

    vLLM would bind each rank to its own NUMA node, and refuse if there are fewer nodes. It would also bind
    ranks of other engines to the same cores. A user can set VLLM_CPU_OMP_THREADS_BIND to decide otherwise.
    """
    if os.environ.setdefault(BINDING, UNBOUND) == UNBOUND:
        os.environ["OMP_NUM_THREADS"] = str(threads(ranks, _cores()))


def threads(ranks: int, cores: int) -> int:
    """Threads of each rank if `ranks` ranks share a host. As in vLLM, one core is left for the scheduler and
    HTTP.

    With more threads than cores, ranks wait for each other by spinning.
    """
    return max(1, (cores - 1) // ranks)


def _cores() -> int:
    """The cores that this process may use, at most the number of physical cores."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, psutil.cpu_count(logical=False) or usable)


def fork_ranks() -> None:
    """Make vLLM fork its ranks from this process, which has done their imports and has no computing thread.

    A rank that starts from scratch takes 10 s of CPU and a quarter of a GiB more. vLLM does not fork a
    process that has used a GPU. Threads are bound when a process starts, so ranks with bound threads start
    from scratch.
    """
    if os.environ.get(BINDING, UNBOUND) == UNBOUND:
        os.environ[START_METHOD] = "fork"


def set_environment(
    layers_per_stage: Sequence[int], tensor_parallel: int, kv_cache_bytes: int, on_gpus: bool
) -> None:
    """Set the environment for an engine in this process; its ranks on a CPU get `kv_cache_bytes` each, in
    whole GiB.
    """
    put(environment(layers_per_stage, on_gpus=on_gpus))
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, math.ceil(kv_cache_bytes / 2**30)))
    if not on_gpus:
        share_cores(tensor_parallel * len(layers_per_stage))
