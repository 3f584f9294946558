"""The named events of Responses and Messages: which come from a token, and what a stream has cost so far."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controlplane.gateway.rate_book import RateBook
from controlplane.gateway.stream_events import NamedUsage, has_token, tokens_in
from controlplane.traffic.endpoints import Format
from controlplane.traffic.tenants import Quota, Tenant


def event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json.dumps({"type": kind, **fields}).encode())


CREATED = event("response.created") + event("response.in_progress")
DELTA = event("response.output_text.delta", delta="a")
BLOCK = event("content_block_delta", delta={"text": "a"})


def test_a_response_begins_before_its_first_token() -> None:
    assert not has_token(CREATED)
    for piece in (CREATED + DELTA, DELTA, BLOCK, event("message_start"), b'data: {"choices": []}\n\n'):
        assert has_token(piece)
    assert [tokens_in(piece) for piece in (CREATED, CREATED + DELTA, BLOCK + BLOCK)] == [0, 1, 2]


def test_a_whole_stream_costs_the_engine_s_count() -> None:
    said = {"usage": {"input_tokens": 30, "output_tokens": 40, "total_tokens": 70}}
    response = event("response.completed", response={"tools": [{"input_tokens": 1}], **said})
    message = event("message_delta", usage={"input_tokens": 30, "output_tokens": 40})
    for pieces in ((CREATED, DELTA, response), (event("message_start"), BLOCK, message)):
        usage = NamedUsage(9)
        assert b"".join(map(usage.passed, pieces)) == b"".join(pieces)
        assert usage.tokens == 70


def test_a_cut_stream_costs_its_prompt_and_its_events() -> None:
    """The engine's count of the prompt, where the stream began with it, or else the estimate."""
    cut = NamedUsage(9)
    for piece in (CREATED, DELTA[:20], DELTA[20:] + DELTA):
        cut.passed(piece)
    assert cut.tokens == 9 + 2
    begun = event("message_start", message={"usage": {"input_tokens": 30, "output_tokens": 0}})
    cut = NamedUsage(9)
    for piece in (begun, BLOCK):
        cut.passed(piece)
    assert cut.tokens == 30 + 1


@pytest.mark.parametrize(
    ("written", "body", "used"),
    [
        (Format.RESPONSES, {"usage": {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7}}, 7),
        (Format.ANTHROPIC, {"usage": {"input_tokens": 3, "output_tokens": 4}}, 7),
        # A call's arguments are the model's own text.
        (
            Format.ANTHROPIC,
            {
                "content": [{"type": "tool_use", "input": {"total_tokens": 0, "output_tokens": 1}}],
                "usage": {"input_tokens": 3, "output_tokens": 4},
            },
            7,
        ),
        (Format.ANTHROPIC, {"content": [{"type": "tool_use", "input": {"total_tokens": 1}}]}, 60),
    ],
)
def test_a_whole_answer_costs_the_engine_s_count(written: Format, body: dict[str, Any], used: int) -> None:
    book = RateBook(lambda: 0.0)
    tenant = Tenant("a", quota=Quota(tokens_per_minute=100))
    charge = book.charge(tenant, 60)
    assert charge is not None
    charge.format = written
    charge.whole(json.dumps(body).encode())
    assert list(book.report().levels.values()) == [100 - used]
