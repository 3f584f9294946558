"""A part of every rank's worker that reports its memory, and each step's time on the device itself."""

from __future__ import annotations

import os
import time
from typing import Any

import psutil
import torch

from workers import plugin
from workers.group import token_broadcast
from workers.group.storage import storage_bytes
from workers.measuring import start_barrier
from workers.measuring.engine_run_job import VARIANTS_VARIABLE
from workers.measuring.free_memory_wait import Sample, stable_free_bytes, taken
from workers.measuring.timing import decode_ms
from workers.patches.torch.graph_replays import GraphReplays
from workers.patches.vllm import attention_splits, graph_memory, layer_sharing

# vLLM imports this module in each rank before the rank touches its device or builds its part of the model.
layer_sharing.install()
if VARIANTS_VARIABLE in os.environ:
    plugin.register()
if torch.cuda.is_available():
    graph_memory.install()
    attention_splits.install()
    token_broadcast.install()


def _free_bytes() -> tuple[int, ...]:
    """Free bytes of each visible GPU, read without our own context on it; empty if there is none."""
    if not torch.cuda.is_available():
        return ()
    from vllm.platforms import current_platform
    from vllm.third_party import pynvml

    pynvml.nvmlInit()
    physical = map(current_platform.device_id_to_physical_device_id, range(torch.cuda.device_count()))
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in physical]

    def processes(handle: Any) -> int:
        try:
            return len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
        except pynvml.NVMLError:  # some containers do not allow it
            return 0

    def look() -> Sample:
        free = tuple(int(pynvml.nvmlDeviceGetMemoryInfo(handle).free) for handle in handles)
        return Sample(free, sum(map(processes, handles)))

    return stable_free_bytes(look)


_BEGAN_S = time.monotonic()
start_barrier.wait()
FREE_BYTES = _free_bytes()
WAITED_S = time.monotonic() - _BEGAN_S


class Probe:
    """Mixed into vLLM's worker (`worker_extension_cls`); its methods are called by name on every rank."""

    # of vLLM's worker
    model_runner: Any
    cache_config: Any
    vllm_config: Any
    local_rank: int
    init_snapshot: Any
    non_torch_memory: int
    total_consumed: int

    def probe_waited(self) -> float:
        """The seconds that `start_barrier` and `free_memory_wait` held this rank back."""
        return WAITED_S

    def probe_memory(self) -> dict[str, int]:
        """The memory in bytes, as vLLM found it at its start (see RankMemory).

        On a CPU `runtime` is all other memory that the process has touched, including weights packed by vLLM.
        Before the first request it contains nothing of the KV cache. On a GPU vLLM counts only memory
        allocated after the context and the communication, so these are added. Raises RuntimeError if other
        processes released memory meanwhile.
        """
        kv_cache = storage_bytes(getattr(self.model_runner, "kv_caches", []))
        blocks, block = self.cache_config.num_gpu_blocks or 0, self.cache_config.block_size
        weights = int(getattr(self.model_runner, "model_memory_usage", 0)) or self._parameter_bytes()
        resident = psutil.Process().memory_info().rss
        runtime = max(0, resident - weights)
        if FREE_BYTES:
            runtime = self._taken_bytes(self.init_snapshot.free_memory) + self._came_bytes(weights)
        return {
            "weights": weights,
            "activations": int(getattr(self, "peak_activation_memory", 0)),
            "graphs": graph_memory.graph_bytes(self),
            "runtime": runtime,
            "kv_cache": kv_cache,
            "kv_tokens": blocks * block,
            "held": self._held_bytes() if FREE_BYTES else resident,
        }

    def _held_bytes(self) -> int:
        """The memory of this process on its GPU, if no other process took or released any meanwhile."""
        free, _ = torch.cuda.mem_get_info()
        return self._taken_bytes(free)

    def _came_bytes(self, weights: int) -> int:
        """The memory that a first pass left in addition to weights; vLLM 0.26 counts it alone, later versions
        with the weights.
        """
        if hasattr(self, "non_torch_memory"):
            return int(self.non_torch_memory)
        return int(self.total_consumed) - weights

    def _taken_bytes(self, free: int) -> int:
        return taken(FREE_BYTES[self.local_rank], int(free), self.local_rank)

    def _parameter_bytes(self) -> int:
        """The bytes of the parameters. A tied head is the embedding's memory and counts once."""
        held = {p.data_ptr(): p.nbytes for p in self.model_runner.get_model().parameters()}
        return sum(held.values())

    def probe_begin(self) -> None:
        """Time every replay of a captured graph from now on; on a CPU there are none."""
        self._replays = GraphReplays() if torch.cuda.is_available() else None

    def probe_end(self) -> float:
        """Seconds of a decode step since `probe_begin`; 0 if no graph was replayed."""
        replays = self._replays.end() if self._replays is not None else []
        return decode_ms(replays) / 1e3 if replays else 0.0
