"""An answer that cannot be detokenised ends its request only.

In vLLM the error ends the loop that reads the outputs of all requests, and with it the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

from profiler.patches.target import Target

log = logging.getLogger(__name__)

PROCESS = Target(
    "vllm.v1.engine.output_processor",
    "OutputProcessor.process_outputs",
    ("engine_core_outputs",),
    read={"0.26": "a4d365d3b329", "0.32": "daef16825986"},
)


def install(processor: Any) -> None:
    """Make this OutputProcessor give a failing request its error, and continue with the others."""

    def make(process: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(process)
        def process_outputs(engine_core_outputs: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
            walk, failures = _Walk(engine_core_outputs), 0
            while True:
                try:
                    done = process(walk, *args, **kwargs)
                except Exception as e:
                    failures += 1
                    _fail(processor, walk, e)
                    continue
                if failures:
                    done.reqs_to_abort.extend(_ended_here(processor, walk.outputs))
                return done

        return process_outputs

    PROCESS.replace_once(make, processor)


class _Walk:
    """Outputs in order; another loop continues where the last one stopped."""

    def __init__(self, outputs: Iterable[Any]) -> None:
        self.outputs = list(outputs)
        self.taken = 0

    def __iter__(self) -> Iterator[Any]:
        while self.taken < len(self.outputs):
            self.taken += 1
            yield self.outputs[self.taken - 1]


def _fail(processor: Any, walk: _Walk, error: Exception) -> None:
    """Give the error to the request of the last output taken; its waiting caller then aborts the request.

    Raises the error if it belongs to no request.
    """
    state = None
    if walk.taken:
        state = processor.request_states.get(walk.outputs[walk.taken - 1].request_id)
    if state is None or state.queue is None:
        raise error
    log.warning("a request's answer could not be decoded to text: %r", error, exc_info=error)
    # Not the error itself: vLLM treats a ValueError as a refusal, and would leave the request in its core.
    state.queue.put(RuntimeError(f"the answer could not be decoded to text: {error!r:.200}"))


def _ended_here(processor: Any, outputs: list[Any]) -> list[str]:
    """Requests that ended here, for example by a stop string, while the core continues them.

    vLLM's loop would have reported them, but an error interrupted it. Aborting a request that is gone does
    nothing.
    """
    return [
        output.request_id
        for output in outputs
        if output.request_id not in processor.request_states and not output.finished
    ]
