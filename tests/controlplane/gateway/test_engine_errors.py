"""The meaning of an engine's error bodies for a user: whose mistake it was."""

from __future__ import annotations

import json

import pytest

from controlplane import errors
from controlplane.gateway.engine_errors import from_engine, from_engine_event

# vLLM's texts for `{"structured_outputs": {"json": {"$ref": "#"}}}` and `{"grammar": "root ::= root"}`.
GIVEN_UP = json.dumps(
    {"error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}}
).encode()


def test_a_grammar_that_cannot_be_followed_is_the_requests_fault() -> None:
    error = from_engine(500, GIVEN_UP, "structured_outputs")
    assert isinstance(error, errors.InvalidRequest)
    assert (error.status, error.param) == (400, "structured_outputs")
    streamed = from_engine_event(b"data: " + GIVEN_UP + b"\n\n", "tools")
    assert (streamed.status, streamed.param) == (400, "tools")


def test_a_refused_grammar_is_named_by_the_field_that_brought_it() -> None:
    said = {"message": "the grammar cannot be used", "param": "structured_outputs", "code": 400}
    body = json.dumps({"error": said}).encode()
    assert from_engine(400, body, "response_format").param == "response_format"
    assert from_engine_event(b"data: " + body + b"\n\n", "tools").param == "tools"
    assert from_engine(400, body).param == "structured_outputs"


@pytest.mark.parametrize("status", [500, 502])
@pytest.mark.parametrize("grammar", ["", "structured_outputs"])
def test_other_failures_are_the_engine_s(status: int, grammar: str) -> None:
    other = json.dumps({"error": {"message": "EngineCore encountered an issue", "code": status}}).encode()
    assert isinstance(from_engine(status, other, grammar), errors.EngineFailed)
    assert isinstance(from_engine(500, GIVEN_UP), errors.EngineFailed)
    assert isinstance(from_engine_event(b"data: " + GIVEN_UP + b"\n\n"), errors.EngineFailed)
