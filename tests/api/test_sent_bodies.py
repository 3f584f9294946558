"""The body that an engine receives: written again, or sent as it came."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane import errors
from controlplane.api.inference.body import parse_body
from controlplane.api.inference.engine_call import engine_call
from controlplane.traffic.endpoints import CHAT, COMPLETIONS
from controlplane.traffic.route_table import Route
from workers.messages import VariantRef

BASE = Route("m", "m", 64, None, 0.0)
VARIANT = Route("v", "m", 64, VariantRef("v", 7, "/a"), 0.0)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(
    ["max_tokens", "max_completion_tokens", "priority", "cache_salt", "messages", "prompt", "stream", "n"]
)
bodies = st.dictionaries(names | st.text(max_size=4), values, max_size=6)


def written(body: dict[str, Any], ascii_only: bool, indent: int | None, encoding: str, end: str) -> bytes:
    text = json.dumps(body, ensure_ascii=ascii_only, indent=indent) + end
    return text.encode(encoding, "surrogatepass")


@given(
    bodies,
    st.sampled_from(["m", "m:v", "v"]),
    st.sampled_from([BASE, VARIANT]),
    st.sampled_from([CHAT, COMPLETIONS]),
    st.booleans(),
    st.sampled_from([None, 0, 2]),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"]),
    st.sampled_from(["", " ", "\r\n\t"]),
)
def test_the_engine_reads_the_same(
    body: dict[str, Any],
    name: str,
    route: Route,
    path: str,
    ascii_only: bool,
    indent: int | None,
    encoding: str,
    end: str,
) -> None:
    raw = written({**body, "model": name}, ascii_only, indent, encoding, end)
    read = parse_body(raw)
    try:
        anew = engine_call(path, read, route)
    except errors.InvalidRequest:
        with pytest.raises(errors.InvalidRequest):
            engine_call(path, read, route, raw)
        return
    as_it_came = engine_call(path, read, route, raw)
    assert json.loads(as_it_came.body) == json.loads(anew.body)
    assert as_it_came.body.isascii()
    assert (as_it_came.path, as_it_came.variant) == (anew.path, anew.variant)


def test_a_plain_body_is_sent_as_it_came() -> None:
    raw = b'{"model":"m",  "messages": [] }\n'
    call = engine_call(CHAT, parse_body(raw), BASE, raw)
    assert call.body == b'{"model":"m",  "messages": [] , "max_completion_tokens": 64}'
    limited = b'{"model":"m","prompt":"a","max_tokens":3}'
    assert engine_call(COMPLETIONS, parse_body(limited), BASE, limited).body == limited


@pytest.mark.parametrize(
    ("path", "most", "asked", "sent"),
    [
        (CHAT, 64, {"max_tokens": 4096}, {"max_tokens": 64}),
        (CHAT, 64, {"max_completion_tokens": 1024}, {"max_completion_tokens": 64}),
        (
            CHAT,
            64,
            {"max_completion_tokens": 70, "max_tokens": 3},
            {"max_completion_tokens": 64, "max_tokens": 3},
        ),
        (CHAT, 64, {"max_tokens": 64}, {"max_tokens": 64}),
        (CHAT, 64, {}, {"max_completion_tokens": 64}),
        (CHAT, 64, {"max_tokens": None}, {"max_tokens": None, "max_completion_tokens": 64}),
        (CHAT, None, {"max_tokens": 4096}, {"max_tokens": 4096}),
        (CHAT, None, {}, {}),
        (COMPLETIONS, 64, {"max_tokens": 100}, {"max_tokens": 64}),
        (COMPLETIONS, 64, {"max_tokens": None}, {"max_tokens": 64}),  # null is the context's end
        (COMPLETIONS, 64, {}, {}),  # 16, as OpenAI has it
        (COMPLETIONS, 8, {}, {"max_tokens": 8}),
        (COMPLETIONS, None, {"max_tokens": None}, {"max_tokens": None}),
    ],
)
def test_answers_are_cut_at_the_deployment_s_limit(
    path: str, most: int | None, asked: dict[str, Any], sent: dict[str, Any]
) -> None:
    body = {"model": "m", "prompt" if path == COMPLETIONS else "messages": [], **asked}
    raw = json.dumps(body).encode()
    for call in (
        engine_call(path, body, replace(BASE, max_output_tokens=most), as_it_came)
        for as_it_came in (b"", raw)
    ):
        got = json.loads(call.body)
        assert {name: value for name, value in got.items() if name.startswith("max_")} == sent


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32-be"])
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize(
    "body", [{"request_id": "\ud800"}, {"x": ["a\udfff"]}, {"\udc00\ud800": 1}, {"x": "\\ud800\udc00"}]
)
def test_half_of_a_surrogate_pair_is_refused(body: dict[str, Any], ascii_only: bool, encoding: str) -> None:
    """vLLM answers 500 to some of them: its engine cannot be sent what UTF-8 cannot hold."""
    with pytest.raises(errors.InvalidRequest, match="surrogate"):
        parse_body(written({**body, "model": "m"}, ascii_only, None, encoding, ""))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32-le"])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_both_halves_are_a_character(ascii_only: bool, encoding: str) -> None:
    body = {
        "model": "m",
        "prompt": "\N{GRINNING FACE}\N{GRINNING FACE} \N{HANGUL SYLLABLE HIH} \ue000 \\ud800",
    }
    assert parse_body(written(body, ascii_only, None, encoding, "")) == body


def test_the_field_that_wants_a_form_of_the_answer_goes_along() -> None:
    asked = {"model": "m", "prompt": "x", "structured_outputs": {"regex": "a"}}
    assert engine_call(COMPLETIONS, asked, BASE).grammar == "structured_outputs"
    assert engine_call(COMPLETIONS, {"model": "m", "prompt": "x"}, BASE).grammar == ""
