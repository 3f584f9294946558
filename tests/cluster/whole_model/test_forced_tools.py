"""Tools with a model whose template shows none: calls that are forced work, and `auto` says what to do."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("model", ["smol", "kinship"])
@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
def test_a_forced_call(whole_client: openai.OpenAI, model: str, choice: Any) -> None:
    answer = whole_client.chat.completions.create(
        model=model, messages=ASKED, tools=TOOLS, tool_choice=choice, max_tokens=120, temperature=0
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert list(json.loads(call.function.arguments)) == ["city"]


def test_auto_says_what_to_do(whole_client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            whole_client.chat.completions.create(
                model="smol", messages=ASKED, tools=TOOLS, max_tokens=8, stream=stream
            )
        for word in ('"required"', "name a function", "toolCallParser", "--tool-call-parser"):
            assert word in caught.value.message
        assert "--enable-auto-tool-choice" not in caught.value.message
