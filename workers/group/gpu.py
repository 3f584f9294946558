"""A rank on a GPU that keeps to its plan."""

from __future__ import annotations

import os

import torch
from vllm.v1.worker.gpu_worker import Worker

from workers.agent.reports import DeviceSample
from workers.group import devices, first_use, token_broadcast
from workers.group.rank import PlannedRank
from workers.patches.vllm import attention_splits

# vLLM imports this module in each rank before it builds its part of the model.
attention_splits.install()
token_broadcast.install()


class PlannedGpuRank(PlannedRank, Worker):  # type: ignore[misc]  # vLLM is untyped here
    def warm_up_more(self) -> None:
        first_use.compile_token_ranking(self.model_runner)

    def keep_to(self, kv_cache_bytes: int, sample: DeviceSample) -> None:
        """Set vLLM's share of the GPU so that its check asks only for the KV cache.

        vLLM requires its share of the whole GPU to be free, even with a fixed KV cache. It checks this only
        after its context and NCCL exist. The plan was checked before that; only the KV cache must still be
        free then.
        """
        self.cache_config.gpu_memory_utilization = kv_cache_bytes / sample.total_bytes

    def held_bytes(self, kv_cache: int) -> tuple[int, int]:
        """The memory of this process according to the driver.

        If the driver does not list this pid: the rise in use since the process began, or torch's memory if
        that is more.
        """
        assert self.part is not None
        sample = devices.look(self.part)
        held = devices.held_by(os.getpid(), sample)
        if held is None:
            held = max(sample.used_bytes - self._used_before, int(torch.cuda.memory_reserved()))
        return held, held
