"""An engine that echoes its input, for benchmarks and tests of the path around it.

It answers at once, or at a pace: then a token takes `echo_tpot_s`, and requests beyond `max_num_seqs` wait.
With a pace its capacity does not depend on the machine's cores.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from itertools import cycle, islice
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

# The fingerprint of an answer contains this, so that tests see which variant answered.
_ANSWERER = "ostinato.answerer"


class Speaker(NamedTuple):
    """The source of a stream: the requested model name, the base or variant that answers, and the form."""

    model: str
    answerer: str
    is_chat: bool


class EchoEngine:
    """Answers chat and text completions in OpenAI's form; token counts are word counts.

    A stream with `min_tokens`, or `max_tokens` and `ignore_eos`, repeats its words until it has that many.
    """

    version = "echo"
    ranks: tuple[RankReport, ...] = ()  # its memory is negligible
    failed = False

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._variants: dict[int, VariantRef] = {}
        self._limit = config.max_variants
        self.observer = StepObserver()
        self._running, self._waiting = 0, 0
        self._rows = asyncio.Semaphore(config.max_num_seqs)

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
        """Report residency as if the first variants kept the slots for good."""
        slots = self._config.max_variants
        places = tuple(self._place(i, v.uid, slots) for i, v in enumerate(self._variants.values()))
        return EngineResidency(slots, self._limit, skips=0, preemptions=0, blocked=0, variants=places)

    def _place(self, position: int, uid: int, slots: int) -> VariantPlace:
        ranks = tuple(RankBytes(r, 1, int(position < slots)) for r in range(len(self._config.ranks)))
        if position < slots:
            return VariantPlace(uid, Tier.DEVICE, position, ranks)
        return VariantPlace(uid, Tier.HOST, None, ranks, "not in a slot; the first variants keep their slots")

    async def limit_variants(self, limit: int) -> int:
        self._limit = min(max(1, limit), self._config.max_variants)
        return self._limit

    def answer_at_once(self, marker: str) -> None:
        """Does nothing: this engine always answers at once."""

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
        async with self._row():
            if request.get("stream"):
                speaker = Speaker(request["model"], answerer, is_chat)
                await self._send_stream(send, speaker, text, request)
            else:
                if pace_s := self._config.echo_tpot_s:
                    await asyncio.sleep(pace_s * len(text.split()))
                await _answer(send, whole_answer(request["model"], text, is_chat, answerer))

    @asynccontextmanager
    async def _row(self) -> AsyncIterator[None]:
        """A place in the batch; their number is limited only at a pace. None has keys and values."""
        paced = self._config.echo_tpot_s > 0
        if paced:
            self._count(0, 1)
            try:
                await self._rows.acquire()
            finally:
                self._count(0, -1)
        self._count(1, 0)
        try:
            yield
        finally:
            self._count(-1, 0)
            if paced:
                self._rows.release()

    def _count(self, running: int, waiting: int) -> None:
        """Add to the numbers of running and waiting requests."""
        self._running += running
        self._waiting += waiting
        self.observer.requests(self._running, self._waiting, 0.0)

    async def _send_stream(self, send: Any, speaker: Speaker, text: str, request: dict[str, Any]) -> None:
        """Send a stream. A word is a token: writing the first is the prompt's step, each later word is one
        step.
        """
        began_s, words, pace_s = time.perf_counter(), text.split(" "), self._config.echo_tpot_s
        chunks = [_event(speaker, words[0], None)]
        first_s = time.perf_counter()
        chunks += [_event(speaker, word, None) for word in words[1:]]
        took_s, count = time.perf_counter() - first_s, _length(request, len(words))
        self.observer.prefill(len(words), pace_s or first_s - began_s)
        if count > 1:
            self.observer.steps(count - 1, pace_s or took_s / (count - 1))
        # Generated on the fly: a long stream would fill the engine's memory in tests that measure a
        # gateway's.
        tokens: Iterable[bytes] = islice(cycle(chunks), count)
        end = [_event(speaker, "", "stop")]
        options = request.get("stream_options") or {}
        if options.get("include_usage"):
            if options.get("continuous_usage_stats"):
                tokens = _counted(tokens, len(words))
            end.append(_usage_event(speaker, len(words), count))
        await _respond(send, "text/event-stream", tokens, [*end, b"data: [DONE]\n\n"], pace_s)


def _length(request: dict[str, Any], words: int) -> int:
    """Tokens of a stream: its prompt's words, or the number that `min_tokens` or `ignore_eos` requires."""
    if request.get("ignore_eos") and request.get("max_tokens"):
        return int(request["max_tokens"])
    return max(words, request.get("min_tokens") or 0)


async def _body(receive: Any) -> bytes:
    """The whole body: a long body comes in several messages."""
    parts = []
    while True:
        message = await receive()
        parts.append(message["body"])
        if not message.get("more_body"):
            return b"".join(parts)


async def _refuse(send: Any, message: str) -> None:
    await _answer(send, json.dumps({"error": {"message": message, "code": 400}}).encode(), 400)


async def _answer(send: Any, body: bytes, status: int = 200) -> None:
    """Send a whole answer with its length, as vLLM does."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _respond(
    send: Any, content_type: str, parts: Iterable[bytes], end: Iterable[bytes], pace_s: float
) -> None:
    """Send each part `pace_s` after the one before; the parts of the end follow at once."""
    headers = [(b"content-type", content_type.encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for part in parts:
        if pace_s:
            await asyncio.sleep(pace_s)
        await send({"type": "http.response.body", "body": part, "more_body": True})
    for part in end:
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
    return _chunk(speaker, {"choices": [choice]})


def _counted(events: Iterable[bytes], prompt: int) -> Iterator[bytes]:
    """Add the usage so far to each event."""
    for count, event in enumerate(events, start=1):
        usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
        yield event.rstrip()[:-1] + b', "usage": %b}\n\n' % json.dumps(usage).encode()


def _usage_event(speaker: Speaker, prompt: int, answer: int) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
    return _chunk(speaker, {"choices": [], "usage": usage})


def _chunk(speaker: Speaker, more: dict[str, Any]) -> bytes:
    kind = "chat.completion.chunk" if speaker.is_chat else "text_completion"
    chunk = {"id": "echo", "object": kind, "created": 0, "model": speaker.model}
    return b"data: %b\n\n" % json.dumps({**chunk, "system_fingerprint": speaker.answerer, **more}).encode()
