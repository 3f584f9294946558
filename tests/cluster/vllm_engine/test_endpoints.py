"""Responses, Messages and the tokenizer's calls with the makers' own SDKs, on the base and a variant.

A chat with the same prompt says what the answers are to be, and transformers what the tokens are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from testkit.cluster.clusters import Cluster
from tests.cluster.vllm_engine.test_tools import CALLS, SPACES, WRITTEN

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

MODELS = ["smol", "forte"]
QUESTION = "What is the weather in Paris?"
SAID: list[Any] = [{"role": "user", "content": QUESTION}]
SCHEMA = {
    "type": "object",
    "properties": {"zone": {"enum": ["utc", "cet"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
TIME: Any = {"type": "function", "name": "get_time", "parameters": SCHEMA, "strict": False}


@pytest.fixture(scope="module")
def claude(cluster: Cluster) -> Iterator[anthropic.Anthropic]:
    http = anthropic.DefaultHttpxClient(trust_env=False)
    with anthropic.Anthropic(
        base_url=cluster.url, api_key="unused", max_retries=0, http_client=http
    ) as client:
        yield client


@pytest.fixture(scope="module")
def no_space(base_folder: Path) -> dict[str, int]:
    """A bias against white space, of which a model without sense would write JSON."""
    vocabulary = json.loads((base_folder / "tokenizer.json").read_text())["model"]["vocab"]
    return {str(number): -100 for token, number in vocabulary.items() if set(token) <= set(SPACES)}


def chatted(client: openai.OpenAI, model: str, tokens: int) -> tuple[str, int]:
    """A chat's text, and the tokens of its prompt."""
    answer = client.chat.completions.create(model=model, messages=SAID, max_tokens=tokens, temperature=0)
    assert answer.usage is not None
    return answer.choices[0].message.content or "", answer.usage.prompt_tokens


# --- tokens --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_those_of_the_model_s_tokenizer(cluster: Cluster, base_folder: Path, model: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base_folder)
    text = "Once upon a time, in Ω"
    found = cluster.http.post("/tokenize", json={"model": model, "prompt": text, "return_token_strs": True})
    assert found.status_code == 200, found.text
    tokens = tokenizer(text)["input_ids"]
    assert found.json()["tokens"] == tokens
    assert found.json()["count"] == len(tokens)
    assert found.json()["token_strs"] == tokenizer.convert_ids_to_tokens(tokens)
    again = cluster.http.post("/detokenize", json={"model": model, "tokens": tokens}).json()
    assert again == {"prompt": tokenizer.decode(tokens)}
    chat = cluster.http.post("/tokenize", json={"model": model, "messages": SAID}).json()
    assert chat["tokens"] == tokenizer.apply_chat_template(
        SAID, add_generation_prompt=True, tokenize=True, return_dict=False
    )


# --- Responses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_a_response_is_the_chat_s_answer(client: openai.OpenAI, model: str) -> None:
    text, prompt = chatted(client, model, 8)
    asked: dict[str, Any] = {"model": model, "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(input=QUESTION, **asked)
    assert (whole.output_text, whole.model) == (text, model)
    assert whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (prompt, 8)
    events = list(client.responses.create(input=SAID, stream=True, **asked))
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == text
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == text
    assert last.response.usage == whole.usage
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize("model", MODELS)
def test_a_response_calls_tools(client: openai.OpenAI, model: str, no_space: dict[str, int]) -> None:
    asked: dict[str, Any] = {"model": model, "input": QUESTION, "max_output_tokens": 300, "temperature": 0}
    named = {"type": "function", "name": "get_time"}
    forced: dict[str, Any] = {**asked, "tools": [TIME], "tool_choice": named}
    forced["extra_body"] = {"logit_bias": no_space}
    (call,) = client.responses.create(**forced).output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)["zone"] in ("utc", "cet")) == ("get_time", True)
    written = "".join(
        event.delta
        for event in client.responses.create(stream=True, **forced)
        if event.type == "response.function_call_arguments.delta"
    )
    assert written == call.arguments
    regex = re.escape(WRITTEN[1]).replace("\\ ", " ")
    chosen = client.responses.create(
        **asked, tools=[TIME], extra_body={"structured_outputs": {"regex": regex}}
    )
    (call,) = chosen.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == CALLS[1]
    history: list[Any] = [
        *SAID,
        {"type": "function_call", "name": call.name, "arguments": call.arguments, "call_id": call.call_id},
        {"type": "function_call_output", "call_id": call.call_id, "output": "noon"},
    ]
    answer = client.responses.create(model=model, input=history, tools=[TIME], max_output_tokens=4)
    assert answer.usage is not None
    assert answer.usage.output_tokens > 0


def test_a_response_keeps_to_a_schema(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "name": "zone", "schema": {"enum": ["utc", "cet"]}}
    answer = client.responses.create(model="smol", input="a", text={"format": form}, max_output_tokens=20)
    assert json.loads(answer.output_text) in ("utc", "cet")


def test_a_response_that_must_be_kept_is_refused_by_name(client: openai.OpenAI) -> None:
    refused: list[dict[str, Any]] = [{"store": True}, {"background": True}, {"previous_response_id": "a"}]
    for more in refused:
        with pytest.raises(openai.BadRequestError, match="responses are not kept") as error:
            client.responses.create(model="smol", input="a", **more)
        assert error.value.param in more


# --- Messages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_a_message_is_the_chat_s_answer(
    client: openai.OpenAI, claude: anthropic.Anthropic, model: str
) -> None:
    text, prompt = chatted(client, model, 8)
    asked: dict[str, Any] = {"model": model, "max_tokens": 8, "temperature": 0, "messages": SAID}
    whole = claude.messages.create(**asked)
    assert [(block.type, getattr(block, "text", "")) for block in whole.content] == [("text", text)]
    assert (whole.model, whole.stop_reason) == (model, "max_tokens")
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (prompt, 8)
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == text
        last = stream.get_final_message()
    assert (last.stop_reason, last.usage.output_tokens) == ("max_tokens", 8)
    assert claude.messages.count_tokens(model=model, messages=SAID).input_tokens == prompt


@pytest.mark.parametrize("model", MODELS)
def test_a_message_keeps_its_system_prompt_and_tools(claude: anthropic.Anthropic, model: str) -> None:
    tools: list[Any] = [{"name": "get_time", "input_schema": SCHEMA}]
    history: list[Any] = [
        *SAID,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "get_time", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "noon"}]},
    ]
    alone = claude.messages.count_tokens(model=model, messages=SAID).input_tokens
    more = claude.messages.count_tokens(model=model, messages=history, tools=tools, system="Be brief.")
    assert more.input_tokens > alone
    system: list[Any] = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    answer = claude.messages.create(
        model=model, messages=history, tools=tools, system=system, max_tokens=4, temperature=0
    )
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (more.input_tokens, 4)


@pytest.mark.parametrize("model", MODELS)
def test_a_message_calls_a_tool(claude: anthropic.Anthropic, model: str) -> None:
    tools: list[Any] = [{"name": "get_time", "input_schema": {"enum": [{"zone": "utc"}]}}]
    asked: dict[str, Any] = {"model": model, "max_tokens": 100, "temperature": 0, "messages": SAID}
    asked |= {"tools": tools, "tool_choice": {"type": "tool", "name": "get_time"}}
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        last = stream.get_final_message()
    for message in (whole, last):
        (block,) = message.content
        assert block.type == "tool_use"
        assert (block.name, block.input, message.stop_reason) == ("get_time", {"zone": "utc"}, "tool_use")


def test_errors_have_anthropic_s_form(cluster: Cluster, claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.messages.create(model="nobody", messages=SAID, max_tokens=4)
    body: Any = unknown.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    assert body["error"]["code"] == "model_not_found"
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}
    shown: Any = [{"role": "user", "content": [image]}]
    with pytest.raises(anthropic.BadRequestError, match="expected blocks of type text"):
        claude.messages.create(model="smol", messages=shown, max_tokens=4)
    with pytest.raises(anthropic.BadRequestError, match="max_model_len"):
        claude.messages.create(model="smol", messages=SAID, max_tokens=100_000)
    missing = cluster.http.post("/v1/messages", json={"model": "smol", "messages": SAID})
    assert (missing.status_code, missing.json()["type"]) == (400, "error")
    assert "max_tokens" in missing.text


def test_a_grammar_that_fails_ends_each_stream_by_its_own_error_event(cluster: Cluster) -> None:
    """The request's own mistake: no worker is thought dead, and no connection is broken."""
    deep: dict[str, Any] = {"$ref": "#/nowhere"}
    form = {"type": "json_schema", "name": "n", "schema": deep}
    for path, body in (
        ("/v1/responses", {"input": "a", "text": {"format": form}}),
        ("/v1/messages", {"messages": SAID, "max_tokens": 4, "output_config": {"format": form}}),
    ):
        for stream in (False, True):
            answer = cluster.http.post(path, json={"model": "smol", "stream": stream, **body})
            assert answer.status_code == 400, (path, stream, answer.text)
            assert answer.json()["error"]["code"] == "invalid_request"


def test_a_client_that_leaves_frees_its_place(cluster: Cluster) -> None:
    for path, body in (
        ("/v1/responses", {"input": "a", "ignore_eos": True, "max_output_tokens": 200}),
        ("/v1/messages", {"messages": SAID, "max_tokens": 200}),
    ):
        asked = {"model": "smol", "stream": True, **body}
        with httpx.stream("POST", cluster.url + path, json=asked, timeout=60, trust_env=False) as answer:
            assert next(answer.iter_lines()).startswith("event: ")
