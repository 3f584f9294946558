"""The memory of captured CUDA graphs, which only the call that captures them returns.

vLLM's own earlier estimate is always 0 on its V2 runner (0.26), which runs every dense model. And vLLM reads
the runtime's memory before graphs are captured.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

ATTRIBUTE = "graph_bytes"


def install() -> None:
    """Record the memory in a rank on a GPU; must be called before it makes its worker."""
    from vllm.v1.worker.gpu_worker import Worker

    record(Worker)


def record(worker: Any) -> None:
    """Make a vLLM worker class keep the result of its runner's `capture_model`, for any runner."""
    warm_up = worker.compile_or_warm_up_model

    @wraps(warm_up)
    def recorded(self: Any) -> Any:
        capture = self.model_runner.capture_model

        def captured() -> int:
            graph_bytes = int(capture())
            setattr(self, ATTRIBUTE, graph_bytes)
            return graph_bytes

        self.model_runner.capture_model = captured
        return warm_up(self)

    worker.compile_or_warm_up_model = recorded


def graph_bytes(worker: Any) -> int:
    """The bytes of a worker's graphs; 0 if nothing was captured."""
    return int(getattr(worker, ATTRIBUTE, 0))
