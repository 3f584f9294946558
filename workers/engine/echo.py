"""An engine that echoes its input, for benchmarks and tests of the path around it.

It answers at once, or at a pace: then a token takes `echo_tpot_s`, and requests beyond `max_num_seqs` wait.
With a pace its capacity does not depend on the machine's cores.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from itertools import cycle, islice
from typing import Any

from workers.asgi import AsgiApp, Message
from workers.engine.echo_forms import FORMS, Form, Speaker, counted, of_tokenizer
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


class EchoEngine:
    """Answers every inference call in its API's form; token counts are word counts.

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
        request, path = json.loads(await _body(receive)), scope["path"]
        try:
            answer = of_tokenizer(path, request)
            form = None if answer is not None else FORMS[path]
            text = "" if form is None else form.text(request)
        except (LookupError, TypeError):
            await _refuse(send, f"expected a text to echo in a request of {path}")
            return
        if form is None:
            await _answer(send, answer or b"")
            return
        text = text if isinstance(text, str) else json.dumps(text)
        speaker = Speaker(request["model"], scope.get(_ANSWERER, "base"))
        async with self._row():
            if request.get("stream"):
                await self._send_stream(send, form, speaker, text, request)
            else:
                if pace_s := self._config.echo_tpot_s:
                    await asyncio.sleep(pace_s * len(text.split()))
                await _answer(send, form.whole(speaker, text))

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

    async def _send_stream(
        self, send: Any, form: Form, speaker: Speaker, text: str, request: dict[str, Any]
    ) -> None:
        """Send a stream. A word is a token: writing the first is the prompt's step, each later word is one
        step.
        """
        began_s, words, pace_s = time.perf_counter(), text.split(" "), self._config.echo_tpot_s
        chunks = [form.token(speaker, words[0])]
        first_s = time.perf_counter()
        chunks += [form.token(speaker, word) for word in words[1:]]
        took_s, count = time.perf_counter() - first_s, _length(request, len(words))
        self.observer.prefill(len(words), pace_s or first_s - began_s)
        if count > 1:
            self.observer.steps(count - 1, pace_s or took_s / (count - 1))
        # Generated on the fly: a long stream would fill the engine's memory in tests that measure a
        # gateway's.
        tokens: Iterable[bytes] = islice(cycle(chunks), count)
        options = request.get("stream_options") or {}
        usage = bool(options.get("include_usage"))
        if usage and options.get("continuous_usage_stats"):
            tokens = counted(tokens, len(words))
        first = form.first(speaker, len(words))
        last = form.last(speaker, text, len(words), count, usage)
        await _respond(send, first, tokens, last, pace_s)


def _length(request: dict[str, Any], words: int) -> int:
    """Tokens of a stream: its prompt's words, or the number that `min_tokens` or `ignore_eos` requires."""
    limit = request.get("max_tokens") or request.get("max_output_tokens")
    if request.get("ignore_eos") and limit:
        return int(limit)
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
    send: Any, first: Iterable[bytes], parts: Iterable[bytes], end: Iterable[bytes], pace_s: float
) -> None:
    """Send a stream: each part `pace_s` after the one before; the events before and after them at once."""
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for part in first:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    for part in parts:
        if pace_s:
            await asyncio.sleep(pace_s)
        await send({"type": "http.response.body", "body": part, "more_body": True})
    for part in end:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
