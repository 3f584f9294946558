"""vLLM's worker, kept to its rank's part of the plan. A mixin for its classes for CPUs and GPUs."""

from __future__ import annotations

import logging
import os
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm.v1.worker.worker_base import WorkerBase

from workers.agent import host
from workers.agent.reports import DeviceSample
from workers.group import devices, processes
from workers.group.journal import READY, Journal
from workers.group.memory_check import NoMemory, refusal, shortage
from workers.group.plan import from_environment
from workers.group.storage import storage_bytes
from workers.patches.vllm import prompt_rows

log = logging.getLogger(__name__)

POLL_S = 0.5


class PlannedRank(WorkerBase):  # type: ignore[misc]  # vLLM is untyped here
    """vLLM's worker methods, in the order in which vLLM calls them; each is recorded in the rank's journal.

    Without a plan (vLLM was not started by us) it changes nothing.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        processes.die_with_parent()  # its parent's request to the kernel does not apply to a forked child
        number = kwargs["rank"]
        self.group = from_environment()
        self.part = self.group.ranks[number] if self.group else None
        self.journal = Journal(self.group.journals, number) if self.group else None
        self._used_before = 0
        if self.part is not None:
            kwargs["vllm_config"].cache_config.kv_cache_memory_bytes = self.part.kv_cache_bytes
        with self._doing("making its worker"):
            super().__init__(*args, **kwargs)

    def init_device(self) -> None:
        with self._doing("claiming its device"):
            self._claim()
            super().init_device()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with self._doing("loading weights"):
            super().load_model(*args, **kwargs)
        prompt_rows.bound(self.model_runner)

    def determine_available_memory(self) -> int:
        with self._doing("profiling a forward pass"):
            return int(super().determine_available_memory())

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        with self._doing("allocating its KV cache"):
            super().initialize_from_config(*args, **kwargs)

    def compile_or_warm_up_model(self) -> Any:
        with self._doing("warming up"):
            result = super().compile_or_warm_up_model()
            self.warm_up_more()
        if self.journal is not None:
            self.journal.write(READY)
        return result

    def warm_up_more(self) -> None:
        """Warm up the parts that vLLM leaves to the first request."""

    def _doing(self, what: str) -> AbstractContextManager[None]:
        return self.journal.doing(what) if self.journal else nullcontext()

    def _claim(self) -> None:
        """Wait a little for the planned memory. Raises NoMemory with its current holders."""
        if self.group is None or self.part is None:
            return
        deadline = time.monotonic() + self.group.wait_s
        sample = devices.look(self.part)
        while shortage(self.part, sample, self.own_bytes()):
            if time.monotonic() > deadline:
                raise NoMemory(refusal(self.rank, self.part, sample))
            time.sleep(POLL_S)
            sample = devices.look(self.part)
        self._used_before = sample.used_bytes
        self.keep_to(self.part.kv_cache_bytes, sample)

    def own_bytes(self) -> int:
        """This process's part of the planned memory before it claims the rest."""
        return 0

    def keep_to(self, kv_cache_bytes: int, sample: DeviceSample) -> None:
        """Tell vLLM its share, if it has its own checks."""

    # --- its memory ----------------------------------------------------------------------------

    def rank_memory(self) -> dict[str, int]:
        """Current bytes, on every rank by `collective_rpc`; see RankReport."""
        kv_cache = storage_bytes(getattr(self.model_runner, "kv_caches", []))
        process, total = self.held_bytes(kv_cache)
        return {
            "rank": self.rank,
            "pid": os.getpid(),
            "weights_bytes": self.weights_bytes(),
            "kv_cache_bytes": kv_cache,
            "process_bytes": process,
            "total_bytes": total,
        }

    def held_bytes(self, kv_cache: int) -> tuple[int, int]:
        """(this process's memory, the same with the whole KV cache).

        The KV cache has not been written to yet, so a CPU has allocated no memory for it.
        """
        held = host.memory_of(os.getpid())
        return held, held + kv_cache

    def weights_bytes(self) -> int:
        """The size of the weights, as vLLM measured it during loading."""
        return int(self.model_runner.model_memory_usage)
