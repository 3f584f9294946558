"""The choice of a step's CUDA graph, where it must differ from vLLM's choice.

vLLM chooses a graph by counts alone: of rows, and of variants. A step whose variant is merged into the base's
weights (`workers.variants.merged_slot`) must run from the base's graph.
"""

from __future__ import annotations

import enum
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from profiler.patches.target import Target

log = logging.getLogger(__name__)

_CHOOSES = ("num_tokens", "num_active_loras")
# For each model runner: its step, and the method that chooses a graph, on an attribute of the runner.
RUNNERS = (
    (
        Target(
            "vllm.v1.worker.gpu_model_runner",
            "GPUModelRunner.execute_model",
            ("scheduler_output",),
            read={"0.26": "6b31293dd9f1", "0.32": "d2d938ab66d1"},
        ),
        "cudagraph_dispatcher",
        Target(
            "vllm.v1.cudagraph_dispatcher",
            "CudagraphDispatcher.dispatch",
            _CHOOSES,
            read={"0.26": "cab8e16e3c42", "0.32": "c4c62f922138"},
        ),
    ),
    (
        Target(
            "vllm.v1.worker.gpu.model_runner",
            "GPUModelRunner.execute_model",
            ("scheduler_output",),
            read={"0.26": "f2d75f2d8b5b", "0.32": "172d90de5fea"},
        ),
        "cudagraph_manager",
        Target(
            "vllm.v1.worker.gpu.cudagraph_utils",
            "CudaGraphManager.dispatch",
            _CHOOSES,
            read={"0.26": "8434099ba392", "0.32": "971b00ab5372"},
        ),
    ),
)


class Graph(enum.Enum):
    """The graph that a step runs from."""

    OF_ITS_VARIANTS = "as vLLM takes it"
    OF_THE_BASE = "the base's"


Choose = Callable[[Any], Graph]


class _Followed:
    """`choose`: the method that the runners of this process ask, as a weak reference: it must not keep an
    engine alive. `as_base`: whether the step that runs now takes the base's graph; a process runs one at a
    time.
    """

    choose: weakref.WeakMethod[Choose] | None = None
    as_base = False


def follow(choose: Choose | None) -> None:
    """Make the runner of this process ask `choose` before each step.

    `choose` is a method that takes vLLM's SchedulerOutput. None: the runner asks no method. Raises Moved.
    """
    _Followed.choose = weakref.WeakMethod(choose) if choose is not None else None
    # The runner in use has been imported: it called us.
    used = [runner for runner in RUNNERS if runner[0].module in sys.modules]
    if choose is not None and not used:
        log.error("no model runner of vLLM is loaded, so merged variants run from their variants' graphs")
    for step, chooser, dispatch in used:
        owner = sys.modules[step.module].GPUModelRunner
        step.replace_once(functools.partial(_asking, chooser=chooser, dispatch=dispatch), owner)


def _asking(inner: Callable[..., Any], chooser: str, dispatch: Target) -> Callable[..., Any]:
    @functools.wraps(inner)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        choose = _Followed.choose() if _Followed.choose is not None else None
        graph = Graph.OF_ITS_VARIANTS if choose is None else choose(scheduler_output)
        owner = getattr(self, chooser) if graph is Graph.OF_THE_BASE else None
        if owner is None:  # without CUDA graphs, too
            return inner(self, scheduler_output, *args, **kwargs)
        dispatch.replace_once(_dispatching, owner)
        _Followed.as_base = True
        try:
            return inner(self, scheduler_output, *args, **kwargs)
        finally:
            _Followed.as_base = False

    return execute_model


def _dispatching(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    def dispatched(*args: Any, **kwargs: Any) -> Any:
        return dispatch(*args, **(_of_the_base(kwargs) if _Followed.as_base else kwargs))

    return dispatched


def _of_the_base(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments for a step of the base. Both runners name them; one of them has no `has_lora`."""
    of_the_base = {"has_lora": False, "num_active_loras": 0}
    return {name: of_the_base.get(name, value) for name, value in asked.items()}
