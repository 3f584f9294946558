"""Tools with a model whose template shows them, on the base and a variant, whole and streamed.

The weights are few and say nothing sensible, so grammars force what is written: a call in the model's own
format, which vLLM reads as it reads all answers with `tool_choice` auto.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest

from testkit.cluster.clusters import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

MODELS = ["smol", "forte"]
SPACES = "\u0120\u010a\u0109\u010d"  # blank, newline, tab, return, as tokenizers of bytes write them
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


def tool(name: str, **properties: Any) -> Any:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}


WEATHER = tool("get_weather", city={"enum": ["Paris", "Oslo"]})
TIME = tool("get_time", zone={"enum": ["utc", "cet"]})
CALLS = [("get_weather", {"city": "Paris"}), ("get_time", {"zone": "utc"})]
WRITTEN = [
    f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    for name, arguments in CALLS
]

Found = tuple[list[tuple[str, Any]], str | None, str | None]


def ask(client: openai.OpenAI, stream: bool, model: str, **options: Any) -> Found:
    """The calls with their arguments, the text, and why it ended."""
    tools = options.pop("tools", [WEATHER, TIME])
    given = {
        "model": model,
        "messages": ASKED,
        "tools": tools,
        "max_tokens": 300,
        "temperature": 0,
        **options,
    }
    if not stream:
        choice = client.chat.completions.create(**given).choices[0]
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
        return _read(calls), choice.message.content, choice.finish_reason
    names, arguments, text, ended = dict[int, str](), dict[int, str](), "", None
    for chunk in client.chat.completions.create(**given, stream=True):
        for choice in chunk.choices:
            ended, text = choice.finish_reason or ended, text + (choice.delta.content or "")
            for call in choice.delta.tool_calls or []:
                if call.function.name:
                    names[call.index] = call.function.name
                arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    return _read([(names[i], arguments[i]) for i in sorted(names)]), text or None, ended


def _read(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


def writing(*texts: str) -> dict[str, Any]:
    """Have the model write exactly these."""
    return {"extra_body": {"structured_outputs": {"regex": re.escape("\n".join(texts)).replace("\\ ", " ")}}}


def lenient(*tools: Any) -> list[Any]:
    """The same, not strict: then a grammar of our own is obeyed with `auto`."""
    return [{**each, "function": {**each["function"], "strict": False}} for each in tools]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_call_that_the_model_chose_to_write(client: openai.OpenAI, model: str, stream: bool) -> None:
    for choice in ({}, {"tool_choice": "auto"}):
        found = ask(client, stream, model, tools=lenient(WEATHER, TIME), **choice, **writing(WRITTEN[0]))
        assert found == (CALLS[:1], None, "tool_calls")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_two_calls_in_one_answer(client: openai.OpenAI, model: str, stream: bool) -> None:
    calls, _, ended = ask(client, stream, model, tools=lenient(WEATHER, TIME), **writing(*WRITTEN))
    assert (calls, ended) == (CALLS, "tool_calls")


@pytest.fixture(scope="module")
def no_space(base_folder: Path) -> dict[str, int]:
    """A bias against tokens of white space. JSON may have any number of them, and a model without sense
    would write no others."""
    vocabulary = json.loads((base_folder / "tokenizer.json").read_text())["model"]["vocab"]
    return {str(number): -100 for token, number in vocabulary.items() if set(token) <= set(SPACES)}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_function_that_is_named(
    client: openai.OpenAI, model: str, stream: bool, no_space: dict[str, int]
) -> None:
    named = {"type": "function", "function": {"name": "get_time"}}
    calls, text, _ = ask(client, stream, model, tool_choice=named, logit_bias=no_space)
    assert [name for name, _ in calls] == ["get_time"]
    assert calls[0][1]["zone"] in ("utc", "cet")
    assert not text


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_call_that_is_required(
    client: openai.OpenAI, model: str, stream: bool, no_space: dict[str, int]
) -> None:
    one: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    calls, text, ended = ask(client, stream, model, **one, logit_bias=no_space)
    assert ended == "tool_calls"
    assert calls in ([("get_weather", {"city": c})] for c in ("Paris", "Oslo")) or calls in (
        [("get_time", {"zone": z})] for z in ("utc", "cet")
    )
    assert not text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_text_stays_text(client: openai.OpenAI, stream: bool) -> None:
    for choice in ("auto", "none"):
        calls, text, _ = ask(
            client, stream, "smol", tools=lenient(WEATHER), tool_choice=choice, **writing("sunny")
        )
        assert (calls, text) == ([], "sunny")


def test_a_tool_s_answer_goes_back_to_the_model(client: openai.OpenAI) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
    }
    history: list[Any] = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    answer = client.chat.completions.create(model="smol", messages=history, tools=[WEATHER], max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


def test_langchain_binds_tools(cluster: Cluster, no_space: dict[str, int]) -> None:
    from langchain_openai import ChatOpenAI  # its import takes as long as many tests

    llm = ChatOpenAI(
        base_url=f"{cluster.url}/v1",
        api_key="unused",
        model="smol:forte",
        max_tokens=300,
        temperature=0,
        logit_bias=no_space,
    )
    answer = llm.bind_tools([WEATHER, TIME], tool_choice="get_time").invoke("What time is it?")
    assert [call["name"] for call in answer.tool_calls] == ["get_time"]
    assert answer.tool_calls[0]["args"]["zone"] in ("utc", "cet")


def test_the_chosen_settings_are_shown_with_reasons(cluster: Cluster) -> None:
    model = cluster.http.get("/models/smol").json()
    assert model["chat"]["toolCallParser"] == "hermes"
    assert model["chat"]["toolCallReason"] == "its chat template has <tool_call>"
