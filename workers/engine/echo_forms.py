"""The echo engine's answers in the form of each API: whole, and as the events of a stream. Pure.

A word is a token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol


class Speaker(NamedTuple):
    """The source of a stream: the requested model name, and the base or variant that answers."""

    model: str
    answerer: str


class Form(Protocol):
    """One API's answers. `prompt` and `count` are numbers of tokens, `usage` what a request wants to know of
    them during a stream."""

    def text(self, request: Mapping[str, Any]) -> Any:
        """The text to echo. Raises LookupError or TypeError if the request has none."""
        ...

    def whole(self, speaker: Speaker, text: str) -> bytes: ...

    def first(self, speaker: Speaker, prompt: int) -> list[bytes]:
        """The events before the first token."""
        ...

    def token(self, speaker: Speaker, word: str) -> bytes: ...

    def last(self, speaker: Speaker, text: str, prompt: int, count: int, usage: bool) -> list[bytes]:
        """The events after the last token."""
        ...


class Completions:
    """OpenAI's chats and completions."""

    def __init__(self, is_chat: bool) -> None:
        self._is_chat = is_chat

    def text(self, request: Mapping[str, Any]) -> Any:
        return request["messages"][-1]["content"] if self._is_chat else request["prompt"]

    def whole(self, speaker: Speaker, text: str) -> bytes:
        return whole_answer(speaker.model, text, self._is_chat, speaker.answerer)

    def first(self, speaker: Speaker, prompt: int) -> list[bytes]:
        return []

    def token(self, speaker: Speaker, word: str) -> bytes:
        return self._event(speaker, word, None)

    def last(self, speaker: Speaker, text: str, prompt: int, count: int, usage: bool) -> list[bytes]:
        end = [self._event(speaker, "", "stop")]
        if usage:
            end.append(self._chunk(speaker, {"choices": [], "usage": _usage(prompt, count)}))
        return [*end, b"data: [DONE]\n\n"]

    def _event(self, speaker: Speaker, text: str, finish: str | None) -> bytes:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
        choice |= {"delta": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        return self._chunk(speaker, {"choices": [choice]})

    def _chunk(self, speaker: Speaker, more: dict[str, Any]) -> bytes:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        chunk = {"id": "echo", "object": kind, "created": 0, "model": speaker.model}
        return (
            b"data: %b\n\n" % json.dumps({**chunk, "system_fingerprint": speaker.answerer, **more}).encode()
        )


class Responses:
    """OpenAI's Responses."""

    def text(self, request: Mapping[str, Any]) -> Any:
        given = request["input"]
        return given if isinstance(given, str) else given[-1]["content"]

    def whole(self, speaker: Speaker, text: str) -> bytes:
        count = len(text.split())
        return json.dumps(self._response(speaker, [self._item(text)], _counts(count, count))).encode()

    def first(self, speaker: Speaker, prompt: int) -> list[bytes]:
        begun = {"response": self._response(speaker, [], None)}
        part = {"type": "output_text", "text": "", "annotations": []}
        return [
            _named("response.created", begun),
            _named("response.in_progress", begun),
            _named(
                "response.output_item.added", {"output_index": 0, "item": {**self._item(""), "content": []}}
            ),
            _named("response.content_part.added", {**_PLACE, "part": part}),
        ]

    def token(self, speaker: Speaker, word: str) -> bytes:
        return _named("response.output_text.delta", {**_PLACE, "delta": word, "logprobs": []})

    def last(self, speaker: Speaker, text: str, prompt: int, count: int, usage: bool) -> list[bytes]:
        item = self._item(text)
        response = self._response(speaker, [item], _counts(prompt, count))
        return [
            _named("response.output_text.done", {**_PLACE, "text": text, "logprobs": []}),
            _named("response.content_part.done", {**_PLACE, "part": item["content"][0]}),
            _named("response.output_item.done", {"output_index": 0, "item": item}),
            _named("response.completed", {"response": response}),
        ]

    def _item(self, text: str) -> dict[str, Any]:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        return {
            "id": _PLACE["item_id"],
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": content,
        }

    def _response(
        self, speaker: Speaker, output: list[dict[str, Any]], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        response = {"id": "resp_echo", "object": "response", "created_at": 0, "model": speaker.model}
        settings = {"parallel_tool_calls": True, "tool_choice": "none", "tools": [], "metadata": None}
        status = "in_progress" if usage is None else "completed"
        return {**response, **settings, "status": status, "output": output, "usage": usage}


class Messages:
    """Anthropic's Messages."""

    def text(self, request: Mapping[str, Any]) -> Any:
        return request["messages"][-1]["content"]

    def whole(self, speaker: Speaker, text: str) -> bytes:
        count = len(text.split())
        content = [{"type": "text", "text": text}]
        return json.dumps(self._message(speaker, content, "end_turn", count, count)).encode()

    def first(self, speaker: Speaker, prompt: int) -> list[bytes]:
        block = {"type": "text", "text": ""}
        return [
            _named("message_start", {"message": self._message(speaker, [], None, prompt, 0)}),
            _named("content_block_start", {"index": 0, "content_block": block}),
        ]

    def token(self, speaker: Speaker, word: str) -> bytes:
        return _named("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": word}})

    def last(self, speaker: Speaker, text: str, prompt: int, count: int, usage: bool) -> list[bytes]:
        delta = {"stop_reason": "end_turn", "stop_sequence": None}
        counted = {"input_tokens": prompt, "output_tokens": count}
        return [
            _named("content_block_stop", {"index": 0}),
            _named("message_delta", {"delta": delta, "usage": counted}),
            _named("message_stop", {}),
        ]

    def _message(
        self, speaker: Speaker, content: list[Any], reason: str | None, prompt: int, count: int
    ) -> dict[str, Any]:
        message = {"id": "msg_echo", "type": "message", "role": "assistant", "model": speaker.model}
        usage = {"input_tokens": prompt, "output_tokens": count}
        return {**message, "content": content, "stop_reason": reason, "stop_sequence": None, "usage": usage}


_PLACE: dict[str, Any] = {"item_id": "msg_echo", "output_index": 0, "content_index": 0}
FORMS: Mapping[str, Form] = {
    "/v1/chat/completions": Completions(is_chat=True),
    "/v1/completions": Completions(is_chat=False),
    "/v1/responses": Responses(),
    "/v1/messages": Messages(),
}


def of_tokenizer(path: str, request: Mapping[str, Any]) -> bytes | None:
    """The answer of a call that generates nothing; None: the path has no such call. A word's id is its
    number of characters."""
    if path == "/detokenize":
        return json.dumps({"prompt": " ".join("w" * token for token in request["tokens"])}).encode()
    if path not in ("/tokenize", "/v1/messages/count_tokens"):
        return None
    messages = request.get("messages")
    words = str(request["prompt"] if messages is None else messages[-1]["content"]).split()
    if path == "/tokenize":
        tokens = [len(word) for word in words]
        return json.dumps({"count": len(words), "max_model_len": 64, "tokens": tokens}).encode()
    return json.dumps({"input_tokens": len(words)}).encode()


def whole_answer(model: str, text: str, is_chat: bool, answerer: str = "base") -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "logprobs": None}
    choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    count = len(text.split())
    kind = "chat.completion" if is_chat else "text_completion"
    answer = {"id": "echo", "object": kind, "created": 0, "model": model, "system_fingerprint": answerer}
    return json.dumps({**answer, "choices": [choice], "usage": _usage(count, count)}).encode()


def counted(events: Iterable[bytes], prompt: int) -> Iterator[bytes]:
    """Add the usage so far to each event of a chat or completion."""
    for count, event in enumerate(events, start=1):
        yield event.rstrip()[:-1] + b', "usage": %b}\n\n' % json.dumps(_usage(prompt, count)).encode()


def _usage(prompt: int, count: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}


def _counts(prompt: int, count: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": count,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + count,
    }


def _named(kind: str, event: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json.dumps({"type": kind, **event}).encode())
