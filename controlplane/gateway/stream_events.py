"""The events of engines' streams, in each API's form: which come from a token, and what they cost.

OpenAI's chats and completions have an event for each token, and no names. Responses and Messages name their
events; some come before the first token, and some close what earlier events opened.
"""

from __future__ import annotations

import re

NAMED = b"event: "
# Responses begin with these before the engine has computed anything.
_BEFORE_TOKENS = (b"event: response.created\n", b"event: response.in_progress\n")
_USAGE = re.compile(rb'"(input|output)_tokens":\s*(\d+)')
# Events with the engine's count of tokens: at the end of a response, at the beginning and end of a message.
_COUNTING = (
    b"event: response.completed\n",
    b"event: response.incomplete\n",
    b"event: message_start\n",
    b"event: message_delta\n",
)


def has_token(piece: bytes) -> bool:
    """Whether a piece of a stream has an event that comes from a token."""
    if not piece.startswith(_BEFORE_TOKENS):
        return True
    return any(event and not event.startswith(_BEFORE_TOKENS) for event in piece.split(b"\n\n"))


def tokens_in(piece: bytes) -> int:
    """The events of a piece that stand for a token. All of OpenAI's do, the last ones included."""
    if not piece.startswith(NAMED):
        return max(1, piece.count(b"\n\n"))
    return sum(b"delta" in event.partition(b"\n")[0] for event in piece.split(b"\n\n"))


def counted_in(text: bytes) -> dict[bytes, int]:
    """The engine's counts of tokens by `input` and `output`; of several counts the last."""
    return {kind: int(tokens) for kind, tokens in _USAGE.findall(text)}


class NamedUsage:
    """The tokens that a stream with named events has cost so far: by the engine's own count where an event
    has it, or else one for each event with a part of the answer. `prompt_tokens` is an estimate."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt = prompt_tokens
        self._answer = 0
        self._total: int | None = None
        self._rest = b""

    @property
    def tokens(self) -> int:
        return self._prompt + self._answer if self._total is None else self._total

    def passed(self, piece: bytes) -> bytes:
        """The part of the stream that goes to the client after this piece: all of it."""
        *events, self._rest = (self._rest + piece).split(b"\n\n")
        for event in events:
            self._count(event)
        return piece

    def _count(self, event: bytes) -> None:
        self._answer += tokens_in(event)
        if not event.startswith(_COUNTING):
            return
        # The answer's text is escaped, and what a response repeats of its request comes before its usage.
        counted = counted_in(event)
        if event.startswith(_COUNTING[2]):
            self._prompt = counted.get(b"input", self._prompt)
        elif counted:
            self._total = sum(counted.values())
