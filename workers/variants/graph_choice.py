"""The choice of a step's CUDA graph, where it must differ from vLLM's choice.

vLLM chooses a graph by counts alone: of rows, and of variants. A step whose variant is merged into the base's
weights (merged_slot.py) must run from the base's graph. This module wraps vLLM's runners, so that such a step
finds that graph.
"""

from __future__ import annotations

import enum
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from workers.variants.alone import BASE_UID

# Both model runners, each with the attribute that chooses its graphs.
RUNNERS = (
    ("vllm.v1.worker.gpu_model_runner", "cudagraph_dispatcher"),
    ("vllm.v1.worker.gpu.model_runner", "cudagraph_manager"),
)
_OURS = "_ostinato_graph_choice"
_NONE = object()


class Graph(enum.Enum):
    """The graph that a step runs from."""

    OF_ITS_VARIANTS = "as vLLM takes it"
    OF_THE_BASE = "the base's"


class Requests:
    """The variant of each request of the runner: vLLM names it once, with a request's first step."""

    def __init__(self) -> None:
        self._uid_of: dict[str, int] = {}

    def see(self, step: Any) -> None:
        """Update from `step`, vLLM's SchedulerOutput."""
        for request_id in step.finished_req_ids:
            self._uid_of.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            if new.lora_request is not None:
                self._uid_of[new.req_id] = new.lora_request.lora_int_id

    def alone(self, step: Any) -> int:
        """The variant of all requests of this step; BASE_UID if they have several or none."""
        uids = self.variants(step)
        return uids.pop() if len(uids) == 1 else BASE_UID

    def variants(self, step: Any) -> set[int]:
        """The variants of all requests of this step; BASE_UID for requests of the base."""
        return {self._uid_of.get(request_id, BASE_UID) for request_id in step.num_scheduled_tokens}


Choose = Callable[[Any], Graph]


class _Followed:
    """The method that the runners of this process ask, as a weak reference: it must not keep an engine
    alive.
    """

    choose: weakref.WeakMethod[Choose] | None = None


def follow(choose: Choose | None) -> None:
    """Make the runner of this process ask `choose` before each step.

    `choose` is a method that takes vLLM's SchedulerOutput. None: the runner asks no method.
    """
    _Followed.choose = weakref.WeakMethod(choose) if choose is not None else None
    for module, chooser in RUNNERS:
        if module in sys.modules:  # the runner in use has been imported: it called us
            _wrap(sys.modules[module].GPUModelRunner, chooser)


def _wrap(runner: Any, chooser: str) -> None:
    """Wrap the runner's `execute_model`; once per process."""
    inner = runner.execute_model
    if hasattr(inner, _OURS):
        return

    @functools.wraps(inner)
    def execute_model(self: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
        choose = _Followed.choose() if _Followed.choose is not None else None
        graph = Graph.OF_ITS_VARIANTS if choose is None else choose(step)
        with _taking(graph, getattr(self, chooser, None)):
            return inner(self, step, *args, **kwargs)

    setattr(execute_model, _OURS, True)
    runner.execute_model = execute_model


def _taking(graph: Graph, chooser: Any) -> AbstractContextManager[None]:
    if graph is Graph.OF_THE_BASE and chooser is not None:
        return _replaced(chooser, "dispatch", functools.partial(_as_base, chooser.dispatch))
    return nullcontext()


def _as_base(dispatch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Dispatch as for the base. Both runners name these arguments; one of them has no `has_lora`."""
    as_base = {"has_lora": False, "num_active_loras": 0}
    return dispatch(*args, **{key: as_base.get(key, value) for key, value in kwargs.items()})


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within the context, `owner.name` is `value`."""
    before = vars(owner).get(name, _NONE)  # a method belongs to its class, not to the object
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _NONE:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
