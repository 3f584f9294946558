"""Responses, Messages and the tokenizer's calls over HTTP: their forms, errors and charges, with an engine
that echoes. `tests/cluster/vllm_engine/test_endpoints.py` asks vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from testkit.api import tenants
from testkit.api.installations import Installation, Start, wait_for
from testkit.api.tenants import As, code, entry

SAID: list[Any] = [{"role": "user", "content": "one two three"}]
RESPONSE = {"model": "base", "input": "one two three"}
MESSAGE = {"model": "base", "messages": SAID, "max_tokens": 20}


def claude(made: Installation, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=made.url, api_key=key, max_retries=0)


@pytest.mark.parametrize("name", ["base", "v1", "base:v1"])
def test_openai_s_sdk_reads_responses(standing: Installation, name: str) -> None:
    with standing.openai() as client:
        answer = client.responses.create(model=name, input="one two three")
        assert (answer.output_text, answer.model) == ("one two three", name.removeprefix("base:"))
        events = list(client.responses.create(model=name, input=SAID, stream=True))
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "onetwothree"
        assert events[-1].type == "response.completed"


@pytest.mark.parametrize("name", ["base", "v1", "base:v1"])
def test_anthropic_s_sdk_reads_messages(standing: Installation, name: str) -> None:
    with claude(standing) as client:
        answer = client.messages.create(model=name, messages=SAID, max_tokens=20)
        assert [getattr(block, "text", "") for block in answer.content] == ["one two three"]
        assert answer.model == name.removeprefix("base:")
        with client.messages.stream(model=name, messages=SAID, max_tokens=20) as stream:
            assert "".join(stream.text_stream) == "onetwothree"
        assert client.messages.count_tokens(model=name, messages=SAID).input_tokens == 3


def test_tokens_are_counted_by_the_engine(standing: Installation) -> None:
    found = standing.post("/tokenize", {"model": "v1", "prompt": "one two three"})
    assert (found.status_code, found.json()["tokens"]) == (200, [3, 3, 5])
    again = standing.post("/detokenize", {"model": "v1", "tokens": [1, 2]})
    assert again.json() == {"prompt": "w ww"}


def test_each_api_has_its_own_errors(start: Start) -> None:
    """A key may come in Anthropic's header; an unknown key, model or field is answered in its form."""
    made = start(api_key="secret")
    made.up()
    with claude(made, "secret") as client:
        assert client.messages.create(model="base", messages=SAID, max_tokens=4).stop_reason == "end_turn"
        with pytest.raises(anthropic.NotFoundError) as unknown:
            client.messages.create(model="nobody", messages=SAID, max_tokens=4)
        with pytest.raises(anthropic.BadRequestError) as wrong:
            client.messages.create(model="base", messages=SAID, max_tokens=4, extra_body={"nothing": 1})
    with claude(made, "other") as client, pytest.raises(anthropic.AuthenticationError) as refused:
        client.messages.create(model="base", messages=SAID, max_tokens=4)
    for error, kind, ours in (
        (unknown, "not_found_error", "model_not_found"),
        (wrong, "invalid_request_error", "invalid_request"),
        (refused, "authentication_error", "unauthorized"),
    ):
        body: Any = error.value.body
        assert (body["type"], body["error"]["type"], body["error"]["code"]) == ("error", kind, ours)
    with made.openai() as client, pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="nobody", input="a")
    assert missing.value.code == "model_not_found"


def test_an_engine_that_breaks_ends_each_stream_by_its_api_s_error_event(served: Installation) -> None:
    with served.openai() as client, pytest.raises(openai.APIError) as broken:
        list(client.responses.create(model="base", input="!break", stream=True))
    body: Any = broken.value.body
    assert body["code"] == "engine_failed"
    said: Any = [{"role": "user", "content": "!break"}]
    with claude(served) as client:
        events = client.messages.create(model="base", messages=said, max_tokens=4, stream=True)
        with pytest.raises(anthropic.APIStatusError) as failed:
            list(events)
    body = failed.value.body
    assert (body["error"]["type"], body["error"]["code"]) == ("api_error", "engine_failed")
    raw = served.post("/v1/responses", {**RESPONSE, "input": "!break", "stream": True}).text
    name, _, data = raw.split("\n\n")[-2].partition("\n")
    event = json.loads(data.removeprefix("data: "))
    assert (name, event["type"], event["code"], event["message"]) == (
        "event: error",
        "error",
        "engine_failed",
        event["error"]["message"],
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/responses", RESPONSE), ("/v1/messages", MESSAGE)])
def test_a_tenant_is_charged_by_the_engine_s_count(
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    stream: bool,
) -> None:
    made = tenants.started(start, tmp_path / "t", entry("a", "inference", tokensPerMinute=1000))
    monkeypatch.setattr(made.services.rates, "_clock", lambda: 1000.0)
    made.up()
    a = As(made, "a")
    assert a.ask("POST", path, {**body, "stream": stream}).status_code == 200
    wait_for(lambda: made.in_flight() == 0)
    (left,) = (level for (_, what), level in made.services.rates.report().levels.items() if "tokens" in what)
    assert left == 1000 - 6, "three words of prompt, three of answer"


def test_tokenizing_costs_no_tokens_but_counts_as_a_request(start: Start, tmp_path: Path) -> None:
    made = tenants.started(
        start, tmp_path / "t", entry("a", "inference", tokensPerMinute=10, requestsPerMinute=3)
    )
    made.up()
    a, asked = As(made, "a"), {"model": "base", "prompt": "one " * 100}
    for path, body in (
        ("/tokenize", asked),
        ("/detokenize", {"model": "base", "tokens": [5] * 100}),
        ("/v1/messages/count_tokens", {"model": "base", "messages": SAID}),
    ):
        assert a.ask("POST", path, body).status_code == 200
    assert code(a.ask("POST", "/tokenize", asked)) == (429, "rate_limit_exceeded")
