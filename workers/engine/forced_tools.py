"""Tool calls of a model with an unknown format: only calls that a grammar forces.

vLLM has a grammar for `tool_choice` "required" and for a named function, with any model, but refuses both
without a parser. This parser finds no calls in free text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.tool_parsers.abstract_tool_parser import ToolParser

try:
    from vllm.entrypoints.generate.base.protocol import DeltaMessage, ExtractedToolCallInformation
except ImportError:  # before 0.30
    from vllm.entrypoints.openai.engine.protocol import DeltaMessage, ExtractedToolCallInformation

NO_FORMAT = (
    'tool_choice "auto" needs a known format of tool calls, but this model\'s format is unknown; send'
    ' tool_choice "required" or name a function, which work with every model. If the model was trained to'
    " call tools, deploy it again with its parser (toolCallParser, --tool-call-parser)"
)


class ForcedToolsOnly(ToolParser):  # type: ignore[misc, unused-ignore]
    """Refuses `auto`, with the remedy in the message."""

    def adjust_request(self, request: Any) -> Any:
        if request.tools and request.tool_choice == "auto":
            raise ValueError(NO_FORMAT)
        return super().adjust_request(request)

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> Any:
        return DeltaMessage(content=delta_text) if delta_text else None
