"""The tokens that a stream has cost so far, by the engine's own count.

Events cannot be counted as tokens: an engine joins several tokens in one event on request (`stream_interval`)
or for a slow reader. So if the tenant has a quota of tokens, each event reports the use so far. Clients that
did not ask for these reports do not see them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

OPTIONS = {"include_usage": True, "continuous_usage_stats": True}
_DATA = b"data: {"


class StreamUsage:
    """The usage of one stream; `body` is its request's body before `counting` changed it."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        options = body.get("stream_options") or {}
        self._shows_total = options.get("include_usage") is True
        self._shows_each = self._shows_total and options.get("continuous_usage_stats") is True
        choices = body.get("n")
        self._choices = choices if type(choices) is int else 1
        self._answers: dict[int, int] = {}  # tokens, by the choice's number among all
        self._prompts: dict[int, int] = {}
        self._total: int | None = None
        self._rest = b""

    @property
    def tokens(self) -> int | None:
        """Tokens of prompts and answers so far; None: not reported."""
        if self._total is not None:
            return self._total
        return sum(self._prompts.values()) + sum(self._answers.values()) if self._prompts else None

    def passed(self, piece: bytes) -> bytes:
        """The part of the stream that goes to the client after this piece."""
        *events, self._rest = (self._rest + piece).split(b"\n\n")
        return b"".join(self._event(event) for event in events)

    def end(self) -> bytes:
        """The rest after the last whole event."""
        rest, self._rest = self._rest, b""
        return rest

    def _event(self, raw: bytes) -> bytes:
        whole = raw + b"\n\n"
        if not raw.startswith(_DATA):
            return whole
        try:
            event = json.loads(raw[len(_DATA) - 1 :])
        except ValueError:
            return whole
        usage = event.get("usage")
        if not isinstance(usage, dict):
            return whole
        choices = event.get("choices") or []
        self._count(usage, choices)
        if self._shows_each or (self._shows_total and not choices):
            return whole
        if not choices:
            return b""
        del event["usage"]
        return b"data: %b\n\n" % json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()

    def _count(self, usage: dict[str, Any], choices: list[Any]) -> None:
        if not choices:
            self._total = int(usage.get("total_tokens") or 0)
        for choice in choices:
            place = choice.get("index") or 0
            self._answers[place] = int(usage.get("completion_tokens") or 0)
            self._prompts[place // self._choices] = int(usage.get("prompt_tokens") or 0)
