"""An engine that echoes its input at once, for benchmarks and tests of the path around it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

from workers.asgi import AsgiApp, Message
from workers.engine.step_observer import StepObserver
from workers.messages import (
    EngineConfig,
    EngineResidency,
    RankBytes,
    RankReport,
    VariantPlace,
    VariantRef,
)
from workers.tiers import Tier

# Told as the fingerprint of an answer: whoever looks sees which variant it was.
_ANSWERER = "ostinato.answerer"


class Speaker(NamedTuple):
    """Of a stream: the name that was asked for, who answers, in which form."""

    model: str
    answerer: str
    is_chat: bool


class EchoEngine:
    """Speaks the OpenAI shapes of chat and text completions; token counts are word counts. A stream with
    `min_tokens` begins anew with its words until it has as many."""

    version = "echo"
    ranks: tuple[RankReport, ...] = ()  # its memory is negligible
    failed = False

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._variants: dict[int, VariantRef] = {}
        self._limit = config.max_variants
        self.observer = StepObserver()
        self._running = 0

    @property
    def app(self) -> AsgiApp:
        return self._serve

    def variants(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(variant.name for variant in self._variants.values()))

    async def answer(self, variant: VariantRef, scope: Message, receive: Any, send: Any) -> None:
        await self.app({**scope, _ANSWERER: f"uid-{variant.uid}"}, receive, send)

    async def ensure_variant(self, variant: VariantRef) -> None:
        self._variants[variant.uid] = variant

    async def load_failure(self, variant: VariantRef) -> Exception | None:
        return None

    async def forget_variant(self, variant: VariantRef) -> None:
        self._variants.pop(variant.uid, None)

    async def prefetch(self, variant: VariantRef) -> None:
        await self.ensure_variant(variant)

    async def residency(self) -> EngineResidency:
        """As if the first variants had the slots, for good."""
        slots = self._config.max_variants
        places = tuple(self._place(i, v.uid, slots) for i, v in enumerate(self._variants.values()))
        return EngineResidency(slots, self._limit, skips=0, preemptions=0, blocked=0, variants=places)

    def _place(self, position: int, uid: int, slots: int) -> VariantPlace:
        ranks = tuple(RankBytes(r, 1, int(position < slots)) for r in range(len(self._config.ranks)))
        if position < slots:
            return VariantPlace(uid, Tier.DEVICE, position, ranks)
        return VariantPlace(uid, Tier.HOST, None, ranks, "not in a slot; the first variants keep theirs")

    async def limit_variants(self, limit: int) -> int:
        self._limit = min(max(1, limit), self._config.max_variants)
        return self._limit

    def answer_at_once(self, marker: str) -> None:
        """It always does."""

    async def check_health(self) -> None:
        return None

    def close(self) -> None:
        return None

    async def _serve(self, scope: Message, receive: Any, send: Any) -> None:
        answerer = scope.get(_ANSWERER, "base")
        request = json.loads(await _body(receive))
        is_chat = scope["path"].endswith("/chat/completions")
        try:
            text = request["messages"][-1]["content"] if is_chat else request["prompt"]
        except (LookupError, TypeError):
            await _refuse(send, f"expected {'messages with content' if is_chat else 'a prompt'}")
            return
        text = text if isinstance(text, str) else json.dumps(text)
        self._run(1)
        try:
            if request.get("stream"):
                speaker = Speaker(request["model"], answerer, is_chat)
                await self._send_stream(send, speaker, text, request.get("min_tokens"))
            else:
                await _answer(send, whole_answer(request["model"], text, is_chat, answerer))
        finally:
            self._run(-1)

    def _run(self, more: int) -> None:
        """So many requests more; all that are here run, and none has keys and values."""
        self._running += more
        self.observer.requests(self._running, 0, 0.0)

    async def _send_stream(self, send: Any, speaker: Speaker, text: str, least: int | None) -> None:
        """A word is a token: to write the first one down is the prompt's step, each other one is a step."""
        began_s, words = time.perf_counter(), text.split(" ")
        chunks = [_event(speaker, words[0], None)]
        first_s = time.perf_counter()
        chunks += [_event(speaker, word, None) for word in words[1:]]
        if len(words) > 1:
            self.observer.steps(len(words) - 1, (time.perf_counter() - first_s) / (len(words) - 1))
        self.observer.prefill(len(words), first_s - began_s)
        # Not made beforehand: a long one would fill the memory of the engine, where a gateway's is looked at.
        again = islice(cycle(chunks), max(0, (least or 0) - len(chunks)))
        end = (_event(speaker, "", "stop"), b"data: [DONE]\n\n")
        await _respond(send, "text/event-stream", chain(chunks, again, end))


async def _body(receive: Any) -> bytes:
    """All of it: a long one comes in several messages."""
    parts = []
    while True:
        message = await receive()
        parts.append(message["body"])
        if not message.get("more_body"):
            return b"".join(parts)


async def _refuse(send: Any, message: str) -> None:
    await _answer(send, json.dumps({"error": {"message": message, "code": 400}}).encode(), 400)


async def _answer(send: Any, body: bytes, status: int = 200) -> None:
    """Whole, with its length, as vLLM answers."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _respond(send: Any, content_type: str, parts: Iterable[bytes]) -> None:
    headers = [(b"content-type", content_type.encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def whole_answer(model: str, text: str, is_chat: bool, answerer: str = "base") -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "logprobs": None}
    choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    count = len(text.split())
    usage = {"prompt_tokens": count, "completion_tokens": count, "total_tokens": 2 * count}
    kind = "chat.completion" if is_chat else "text_completion"
    answer = {"id": "echo", "object": kind, "created": 0, "model": model, "system_fingerprint": answerer}
    return json.dumps({**answer, "choices": [choice], "usage": usage}).encode()


def _event(speaker: Speaker, text: str, finish: str | None) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
    choice |= {"delta": {"role": "assistant", "content": text}} if speaker.is_chat else {"text": text}
    kind = "chat.completion.chunk" if speaker.is_chat else "text_completion"
    chunk = {"id": "echo", "object": kind, "created": 0, "model": speaker.model}
    made = {**chunk, "system_fingerprint": speaker.answerer, "choices": [choice]}
    return b"data: %b\n\n" % json.dumps(made).encode()
