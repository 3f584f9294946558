"""Tools of Responses, and Messages with Anthropic's SDK, on vLLM, on the base and a variant."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from testkit.cluster.clusters import Cluster
from tests.cluster.vllm_engine.test_tools import CALLS, SPACES, WRITTEN

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

MODELS = ["smol", "forte"]
QUESTION = "What is the weather in Paris?"
SAID: list[Any] = [{"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0}  # Anthropic's SDK has no argument for it
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


# --- Responses with tools --------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_a_response_calls_tools(client: openai.OpenAI, model: str, no_space: dict[str, int]) -> None:
    asked: dict[str, Any] = {"model": model, "input": QUESTION, "max_output_tokens": 300, "temperature": 0}
    named = {"type": "function", "name": "get_time"}
    forced: dict[str, Any] = {**asked, "tools": [{**TIME, "strict": True}], "tool_choice": named}
    forced["extra_body"] = {"logit_bias": no_space}
    (call,) = client.responses.create(**forced).output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)["zone"] in ("utc", "cet")) == ("get_time", True)
    written = "".join(
        event.delta
        for event in client.responses.create(stream=True, **forced)
        if event.type == "response.function_call_arguments.delta"
    )
    assert json.loads(written) == json.loads(call.arguments)
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


# --- Messages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_a_message_is_the_chat_s_answer(
    client: openai.OpenAI, claude: anthropic.Anthropic, model: str
) -> None:
    text, prompt = chatted(client, model, 8)
    asked: dict[str, Any] = {"model": model, "max_tokens": 8, "messages": SAID, "extra_body": GREEDY}
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
        model=model, messages=history, tools=tools, system=system, max_tokens=4, extra_body=GREEDY
    )
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (more.input_tokens, 4)


def test_errors_have_anthropic_s_form(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.messages.create(model="nobody", messages=SAID, max_tokens=4)
    body: Any = unknown.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    assert body["error"]["code"] == "model_not_found"
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}
    shown: Any = [{"role": "user", "content": [image]}]
    with pytest.raises(anthropic.BadRequestError, match="expected blocks of type text"):
        claude.messages.create(model="smol", messages=shown, max_tokens=4)
    long: Any = [{"role": "user", "content": "a " * 20_000}]
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        claude.messages.create(model="smol", messages=long, max_tokens=4)


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
            assert answer.status_code == (200 if stream else 400), (path, stream, answer.text)
            assert '"code":"invalid_request"' in answer.text.replace(" ", "")
