"""Steps in which it pays to merge deltas into weights run without a CUDA graph.

A graph's launches hold for every batch of its size, so none of them merges one variant's weights. vLLM takes
a graph for every step that has one, by counts alone. Its runners are wrapped here so that such a step finds
none.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Both model runners, each with what chooses its graphs and the flag of that without which it finds none.
RUNNERS = (
    ("vllm.v1.worker.gpu_model_runner", "cudagraph_dispatcher", "keys_initialized"),
    ("vllm.v1.worker.gpu.model_runner", "cudagraph_manager", "_graphs_captured"),
)
_OURS = "_ostinato_graph_choice"


class Requests:
    """Which variant each request of the runner asks for: vLLM names it once, with a request's first step."""

    def __init__(self) -> None:
        self._uid_of: dict[str, int] = {}

    def see(self, step: Any) -> None:
        """`step`: vLLM's SchedulerOutput."""
        for request_id in step.finished_req_ids:
            self._uid_of.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            if new.lora_request is not None:
                self._uid_of[new.req_id] = new.lora_request.lora_int_id

    def of_at_least(self, rows: int, step: Any) -> set[int]:
        """The variants with a request of so many rows in this step."""
        many = (request_id for request_id, count in step.num_scheduled_tokens.items() if count >= rows)
        return {self._uid_of[request_id] for request_id in many if request_id in self._uid_of}


class _Followed:
    """Whom the runners of this process ask; an engine that is gone is not kept by it."""

    merges: weakref.WeakMethod[Callable[[Any], bool]] | None = None


def follow(merges: Callable[[Any], bool] | None) -> None:
    """Have the runner of this process take no graph for steps that `merges`, a method, says so of. It is
    asked before each step, of vLLM's SchedulerOutput. None: nobody is asked any more."""
    _Followed.merges = weakref.WeakMethod(merges) if merges is not None else None
    for module, chooser, flag in RUNNERS:
        if module in sys.modules:  # the runner that is used has been imported: it called us
            _wrap(sys.modules[module].GPUModelRunner, chooser, flag)


def _wrap(runner: Any, chooser: str, flag: str) -> None:
    """Once per process."""
    inner = runner.execute_model
    if hasattr(inner, _OURS):
        return

    @functools.wraps(inner)
    def execute_model(self: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
        merges = _Followed.merges() if _Followed.merges is not None else None
        if merges is None or not merges(step):
            return inner(self, step, *args, **kwargs)
        with _unset(getattr(self, chooser, None), flag):
            return inner(self, step, *args, **kwargs)

    setattr(execute_model, _OURS, True)
    runner.execute_model = execute_model


@contextmanager
def _unset(chooser: Any, flag: str) -> Iterator[None]:
    before = getattr(chooser, flag, False)
    if before:
        setattr(chooser, flag, False)
    try:
        yield
    finally:
        if before:
            setattr(chooser, flag, before)
