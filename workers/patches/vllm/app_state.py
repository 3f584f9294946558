"""The state of vLLM's OpenAI application, in which it resolves models, answers chats and ends its server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from profiler.patches.target import Target

LORAS = Target(
    "vllm.entrypoints.openai.models.serving",
    "OpenAIServingModels.lora_requests",
    read={"0.26": "142a15b78094", "0.32": "142a15b78094"},
)
CHAT = Target(
    "vllm.entrypoints.openai.chat_completion.serving",
    "OpenAIServingChat.create_chat_completion",
    ("request",),
    read={"0.26": "24f5b997aafc", "0.32": "8910b3e7e19a"},
)


def keep_running(state: Any) -> None:
    """Give vLLM's handler of a dead engine no server to end: Ray Serve replaces the replica instead."""
    state.server = SimpleNamespace(should_exit=False)


def resolve_in(state: Any, table: Any) -> None:
    """Make the application resolve the names of variants in `table`, a mapping to vLLM's LoRARequests."""
    LORAS.replace(lambda _: table, state.openai_serving_models)


def answer_by_grammar(state: Any, plain: Any) -> None:
    """Make the application answer chats that a grammar forces as the application with the state `plain`."""
    state.openai_serving_chat = ByGrammar(state.openai_serving_chat, plain.openai_serving_chat)


class ByGrammar:
    """vLLM's serving of chats: `reasoning` for free answers, `plain` for answers that a grammar forces.

    The engine's core knows only the base's reasoning parser, so a grammar begins with the answer's first
    token and there is no reasoning to read.
    """

    def __init__(self, reasoning: Any, plain: Any) -> None:
        self._reasoning, self._plain = reasoning, plain

    async def create_chat_completion(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        serving = self._plain if _is_forced(request) else self._reasoning
        return await serving.create_chat_completion(request, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reasoning, name)


def _is_forced(request: Any) -> bool:
    """Whether a grammar restricts the answer."""
    form, choice = getattr(request, "response_format", None), getattr(request, "tool_choice", None)
    if getattr(request, "structured_outputs", None) is not None or (form is not None and form.type != "text"):
        return True
    return bool(getattr(request, "tools", None)) and choice not in (None, "auto", "none")
