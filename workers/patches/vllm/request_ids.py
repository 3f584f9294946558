"""A check of each request on its way to the engine's core, with its final parameters.

A token id without a row in the embedding or the logits ends the engine, and vLLM accepts such ids.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from profiler.patches.target import Target

ADD = Target(
    "vllm.v1.engine.output_processor",
    "OutputProcessor.add_request",
    ("request",),
    read={"0.26": "f80035cd4d32", "0.32": "4635c44caaa5"},
)


def install(processor: Any, check: Callable[[Any], None]) -> None:
    """Make this OutputProcessor call `check(request)` first. `check` raises vLLM's error for a request."""

    def make(add_request: Callable[..., None]) -> Callable[..., None]:
        @wraps(add_request)
        def checked(request: Any, *args: Any, **kwargs: Any) -> None:
            check(request)
            add_request(request, *args, **kwargs)

        return checked

    ADD.replace_once(make, processor)
