"""Each grammar is compiled with the backend that vLLM chose for its request.

vLLM chooses a backend for each request, but then compiles with the backend of the engine's first request. A
grammar meant for another backend would be ignored, or would fail.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from profiler.patches.target import Target

INIT = Target(
    "vllm.v1.structured_output",
    "StructuredOutputManager.grammar_init",
    parameters=("request",),
    read={"0.26": "725ce2f60a11", "0.32": "725ce2f60a11"},
)
_MANAGERS = "_ostinato_managers"


def install() -> None:
    """Separate the backends in an engine's core."""
    INIT.replace_once(_separate)


def _separate(init: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def grammar_init(self: Any, request: Any) -> None:
        if request.structured_output_request is None:
            return
        managers = vars(self).setdefault(_MANAGERS, {})
        name = request.sampling_params.structured_outputs._backend
        if name not in managers:
            managers[name] = copy.copy(self)
            managers[name].backend = None
        own = managers[name]
        init(own, request)
        self.backend = self.backend or own.backend  # its masks are used for all

    return grammar_init
