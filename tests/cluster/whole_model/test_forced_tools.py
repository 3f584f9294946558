"""Tools with a model whose template shows none: calls that are forced work, and `auto` says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
SPACES = "\u0120\u010a\u0109\u010d"  # blank, newline, tab, return, as tokenizers of bytes write them
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("model", ["smol", "kinship"])
@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
def test_a_forced_call_is_answered(
    whole_client: openai.OpenAI, smollm2_folder: Path, model: str, choice: Any
) -> None:
    """White space, of which a grammar of JSON allows any number, is made unlikely: the model is small."""
    vocabulary = json.loads((smollm2_folder / "tokenizer.json").read_text())["model"]["vocab"]
    no_space = {str(number): -100 for token, number in vocabulary.items() if set(token) <= set(SPACES)}
    answer = whole_client.chat.completions.create(
        model=model,
        messages=ASKED,
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=200,
        temperature=0,
        logit_bias=no_space,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert list(json.loads(call.function.arguments)) == ["city"]


def test_auto_names_the_setting_to_change(whole_client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            whole_client.chat.completions.create(
                model="smol", messages=ASKED, tools=TOOLS, max_tokens=8, stream=stream
            )
        for word in ('"required"', "name a function", "toolCallParser", "--tool-call-parser"):
            assert word in caught.value.message
        assert "--enable-auto-tool-choice" not in caught.value.message
