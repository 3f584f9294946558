"""Answers requests instead of vLLM's core, at once and with one token, so that only the request path is left.

It answers only requests whose id contains a marker, which the control plane creates for one measurement. The
rest of vLLM handles them like any others: it reads the body, tokenises the prompt, detokenises the token, and
sends events.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from profiler.patches.target import Target

ADD = Target(
    "vllm.v1.engine.core_client",
    "AsyncMPClient.add_request_async",
    ("request",),
    read={"0.26": "048060ef541b", "0.32": "048060ef541b"},
)
TOKEN = 0  # every vocabulary has it


class InstantAnswers:
    """Intercepts vLLM's client of its core while there is a marker."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._marker = ""
        self._put_back: Callable[[], None] | None = None

    def expect(self, marker: str) -> None:
        """Answer requests with `marker` in their ids; with "", stop answering."""
        self._marker = marker
        if self._put_back is not None:
            self._put_back()
            self._put_back = None
        if marker:
            self._put_back = ADD.replace(self._answering, self._core)

    def _answering(self, add: Callable[[Any], Awaitable[None]]) -> Callable[[Any], Awaitable[None]]:
        async def add_request_async(request: Any) -> None:
            if self._marker in request.request_id:
                self._core.outputs_queue.put_nowait(_outputs(request.request_id))
            else:
                await add(request)

        return add_request_async


def _outputs(request_id: str) -> Any:
    """The messages that the core sends for a request that it has queued, scheduled and ended."""
    from vllm.v1.engine import (
        EngineCoreEvent,
        EngineCoreEventType,
        EngineCoreOutput,
        EngineCoreOutputs,
        FinishReason,
    )

    events = [
        EngineCoreEvent.new_event(EngineCoreEventType.QUEUED),
        EngineCoreEvent.new_event(EngineCoreEventType.SCHEDULED),
    ]
    output = EngineCoreOutput(
        request_id=request_id, new_token_ids=[TOKEN], finish_reason=FinishReason.LENGTH, events=events
    )
    return EngineCoreOutputs(outputs=[output])
