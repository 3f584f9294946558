"""A rank on a CPU that keeps to its plan."""

from __future__ import annotations

import os
from typing import Any

from workers.agent import host
from workers.group import processes
from workers.group.cpu_pipeline import CpuRank
from workers.group.rank import PlannedRank
from workers.patches.vllm import token_ranking

token_ranking.install()  # vLLM imports this module in each rank before it serves


class PlannedCpuRank(PlannedRank, CpuRank):
    _loaded_bytes = 0

    def own_bytes(self) -> int:
        return host.memory_of(os.getpid())

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        before = self.own_bytes()
        super().load_model(*args, **kwargs)
        self._loaded_bytes = self.own_bytes() - before

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        processes.unlink_segments()  # all ranks have answered a call since they attached to them
        super().initialize_from_config(*args, **kwargs)

    def weights_bytes(self) -> int:
        """The memory that loading added: vLLM packs weights for the CPU's kernels outside of torch."""
        return self._loaded_bytes
