"""The memory of captured CUDA graphs, which only the call that captures them returns.

vLLM's own earlier estimate is always 0 on its V2 runner (0.26), which runs every dense model. And vLLM reads
the runtime's memory before graphs are captured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from profiler.patches.target import Target

WARM_UP = Target(
    "vllm.v1.worker.gpu_worker",
    "Worker.compile_or_warm_up_model",
    read={"0.26": "3573e4138a8f", "0.32": "30919865f4d7"},
)
ATTRIBUTE = "graph_bytes"


def install(worker: Any = None) -> None:
    """Make a worker keep the result of its runner's `capture_model`, for any runner.

    Must be called before a rank makes its worker. `worker` is the workers' class; without it, vLLM's.
    """
    WARM_UP.replace_once(_recording, worker)


def _recording(warm_up: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(warm_up)
    def recorded(self: Any) -> Any:
        capture = self.model_runner.capture_model

        def captured() -> int:
            graph_bytes = int(capture())
            setattr(self, ATTRIBUTE, graph_bytes)
            return graph_bytes

        self.model_runner.capture_model = captured
        return warm_up(self)

    return recorded


def graph_bytes(worker: Any) -> int:
    """The bytes of a worker's graphs; 0 if nothing was captured."""
    return int(getattr(worker, ATTRIBUTE, 0))
