"""The cost of a stream, by the engine's own count, and the part of it that its client sees."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.gateway.stream_usage import StreamUsage


def event(usage: tuple[int, int] | None, *indices: int, text: str = "a") -> bytes:
    body: dict[str, Any] = {"id": "x", "choices": [{"index": index, "text": text} for index in indices]}
    if usage is not None:
        prompt, answer = usage
        body["usage"] = {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
        }
    return b"data: " + json.dumps(body).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def shown(usage: StreamUsage, *pieces: bytes) -> bytes:
    return b"".join(usage.passed(piece) for piece in pieces) + usage.end()


def test_an_event_may_hold_many_tokens() -> None:
    usage, seen = StreamUsage({}), []
    for piece in (b"", event((7, 100), 0), event((7, 150), 0)):  # the client may leave after any
        usage.passed(piece)
        seen.append(usage.tokens)
    assert seen == [None, 107, 157]


def test_choices_and_prompts_are_added_up() -> None:
    usage = StreamUsage({"n": 2})
    for index, (prompt, answer) in enumerate([(5, 10), (5, 20), (9, 30), (9, 40)]):
        usage.passed(event((prompt, answer), index))
    assert usage.tokens == 5 + 9 + 10 + 20 + 30 + 40
    usage.passed(event((14, 101)))
    assert usage.tokens == 115, "the last event has the last word"


@pytest.mark.parametrize(
    ("options", "sees"),
    [
        (None, (False, False)),
        ({"include_usage": False, "continuous_usage_stats": True}, (False, False)),
        ({"include_usage": True}, (False, True)),
        ({"include_usage": True, "continuous_usage_stats": True}, (True, True)),
    ],
)
def test_clients_see_usage_only_if_they_requested_it(options: Any, sees: tuple[bool, bool]) -> None:
    usage = StreamUsage({"stream_options": options})
    each, total = event((3, 1), 0, text='"usage": {"é'), event((3, 9))
    out = shown(usage, each, total, DONE)
    events = [json.loads(part[6:]) for part in out.split(b"\n\n")[:-2]]
    assert out.endswith(DONE)
    assert events[0]["choices"][0]["text"] == '"usage": {"é'
    assert ("usage" in events[0], len(events) == 2) == sees
    assert usage.tokens == 12


@given(st.lists(st.integers(1, 60), max_size=20))
def test_events_may_be_cut_anywhere(cuts: list[int]) -> None:
    whole = (
        event((3, 1), 0)
        + b'data: {"error": {"code": 500}}\n\n'
        + event(None, 0)
        + event((3, 2))
        + DONE
        + b"x"
    )
    pieces, rest = [], whole
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    usage, at_once = StreamUsage({}), StreamUsage({})
    assert shown(usage, *pieces, rest) == shown(at_once, whole)
    assert usage.tokens == at_once.tokens == 5
