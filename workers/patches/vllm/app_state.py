"""The state of vLLM's application, in which it resolves models, answers requests and ends its server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
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
    ("request", "raw_request"),
    read={"0.26": "24f5b997aafc", "0.32": "8910b3e7e19a"},
)
RESPONSES = Target(
    "vllm.entrypoints.openai.responses.serving",
    "OpenAIServingResponses.create_responses",
    ("request",),
    read={"0.26": "9f6ec1f36273", "0.32": "9f6ec1f36273"},
)
MESSAGES = Target(
    "vllm.entrypoints.anthropic.serving",
    "AnthropicServingMessages.create_messages",
    ("request",),
    read={"0.26": "c747b3b3990c", "0.32": "f2b672491970"},
)
MESSAGE_STREAM = Target(
    "vllm.entrypoints.anthropic.serving",
    "AnthropicServingMessages.message_stream_converter",
    ("generator",),
    read={"0.26": "f1af38e6cad9", "0.32": "f12c6cb0b30a"},
)
GIVEN_UP = Target(
    "vllm.entrypoints.generate.base.serving",
    "GenerateBaseServing._convert_generation_error_to_streaming_response",
    ("e",),
    read={"0.26": "a7af5d8fd045", "0.32": "a7af5d8fd045"},
)
_ERROR = 'data: {"error":'  # the event with which a stream of a chat fails


def keep_running(state: Any) -> None:
    """Give vLLM's handler of a dead engine no server to end: Ray Serve replaces the replica instead."""
    state.server = SimpleNamespace(should_exit=False)


def resolve_in(state: Any, table: Any) -> None:
    """Make the application resolve the names of variants in `table`, a mapping to vLLM's LoRARequests."""
    LORAS.replace(lambda _: table, state.openai_serving_models)


def mend_streams(state: Any) -> None:
    """Keep the reason of a stream's failure, and a message's cache salt.

    vLLM's Messages convert the stream of a chat, and replace its error by one of their own. Its Responses
    convert an error to an event that they refuse to send. vLLM 0.26 drops the salt of a message.
    """
    if (messages := getattr(state, "anthropic_serving_messages", None)) is not None:
        CHAT.replace(_salted, messages)
        MESSAGE_STREAM.replace(_with_errors, messages)
    if (responses := getattr(state, "openai_serving_responses", None)) is not None:
        GIVEN_UP.replace(_raising, responses)


def _raising(convert: Callable[[Exception], str]) -> Callable[[Exception], str]:
    def raised(e: Exception) -> str:
        raise e

    return raised


def _salted(create: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def salted(request: Any, raw_request: Any = None, *args: Any, **kwargs: Any) -> Any:
        if request.cache_salt is None and raw_request is not None:
            request.cache_salt = (await raw_request.json()).get("cache_salt")
        return await create(request, raw_request, *args, **kwargs)

    return salted


def _with_errors(convert: Callable[[Any], AsyncIterator[str]]) -> Callable[[Any], AsyncIterator[str]]:
    async def converted(generator: AsyncIterator[str]) -> AsyncIterator[str]:
        failed: list[str] = []

        async def until_error() -> AsyncIterator[str]:
            async for event in generator:
                if event.startswith(_ERROR):
                    failed.append(event)
                    return
                yield event

        async for event in convert(until_error()):
            yield event
        for event in failed:
            yield event

    return converted


def answer_by_grammar(state: Any, plain: Any) -> None:
    """Make the application answer requests that a grammar forces as the application with the state
    `plain`."""
    for name in ("openai_serving_chat", "openai_serving_responses", "anthropic_serving_messages"):
        setattr(state, name, ByGrammar(getattr(state, name), getattr(plain, name)))


class ByGrammar:
    """vLLM's serving of one API: `reasoning` for free answers, `plain` for answers that a grammar forces.

    The engine's core knows only the base's reasoning parser, so a grammar begins with the answer's first
    token and there is no reasoning to read.
    """

    def __init__(self, reasoning: Any, plain: Any) -> None:
        self._reasoning, self._plain = reasoning, plain

    async def create_chat_completion(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        return await self._serving(request).create_chat_completion(request, *args, **kwargs)

    async def create_responses(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        return await self._serving(request).create_responses(request, *args, **kwargs)

    async def create_messages(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        return await self._serving(request).create_messages(request, *args, **kwargs)

    def _serving(self, request: Any) -> Any:
        return self._plain if _is_forced(request) else self._reasoning

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reasoning, name)


def _is_forced(request: Any) -> bool:
    """Whether a grammar restricts the answer."""
    if getattr(request, "structured_outputs", None) is not None:
        return True
    inner = (getattr(request, name, None) for name in ("text", "output_config"))
    formats = [getattr(request, "response_format", None), *(getattr(each, "format", None) for each in inner)]
    if any(form is not None and form.type != "text" for form in formats):
        return True
    choice = getattr(request, "tool_choice", None)
    return bool(getattr(request, "tools", None)) and getattr(choice, "type", choice) not in _FREE


_FREE = (None, "auto", "none")  # choices of tools without a grammar
