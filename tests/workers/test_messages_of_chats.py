"""vLLM answers Anthropic's Messages by a chat, and we mend what the conversion loses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from workers.patches.vllm.app_state import mend_streams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # vLLM is imported


def messages_of_chats() -> Any:
    """The state of an application with vLLM's serving of Messages alone."""
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    serving = object.__new__(AnthropicServingMessages)
    return SimpleNamespace(anthropic_serving_messages=serving, openai_serving_responses=None)


async def test_a_message_s_stream_ends_with_the_chat_s_own_error() -> None:
    state = messages_of_chats()
    mend_streams(state)
    begun = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}}
    error = 'data: {"error": {"message": "the core died", "code": 500}}\n\n'

    async def chat() -> AsyncIterator[str]:
        yield f"data: {json.dumps({**begun, 'choices': [choice]})}\n\n"
        yield error
        yield "data: [DONE]\n\n"

    events = [event async for event in state.anthropic_serving_messages.message_stream_converter(chat())]
    assert events[0].startswith("event: message_start\n")
    assert events[1:] == [error]


async def test_a_message_keeps_its_cache_salt_in_every_version_of_vllm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM 0.26 drops the field: tenants would share the KV blocks of their prompts."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

    async def created(self: Any, request: Any, raw_request: Any = None) -> Any:
        return request.cache_salt

    monkeypatch.setattr(OpenAIServingChat, "create_chat_completion", created)
    state = messages_of_chats()
    mend_streams(state)

    class Raw:
        async def json(self) -> dict[str, str]:
            return {"cache_salt": "a:7"}

    create = state.anthropic_serving_messages.create_chat_completion
    assert await create(SimpleNamespace(cache_salt=None), Raw()) == "a:7"
    assert await create(SimpleNamespace(cache_salt="b"), Raw()) == "b"


async def test_a_response_s_stream_fails_with_the_engine_s_own_error() -> None:
    """vLLM makes an event of it that its own check of events refuses."""
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.exceptions import GenerationError

    serving = object.__new__(OpenAIServingResponses)
    mend_streams(SimpleNamespace(anthropic_serving_messages=None, openai_serving_responses=serving))

    error = GenerationError("Internal server error")
    with pytest.raises(GenerationError) as raised:
        serving._convert_generation_error_to_streaming_response(error)
    assert raised.value is error
