"""vLLM's parsers that we choose, on what models of each format write; and an engine's choice among them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from profiler.parser_names import REASONING_PARSERS, TOOL_PARSERS
from testkit.engine_configs import echo_config
from workers.group.launch import LaunchError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SAID = '{"city": "Paris"}'
# Calls of get_weather as models of the format write them.
WRITTEN = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {SAID}}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
    "</tool_call>",
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
    "llama3_json": f'{{"name": "get_weather", "parameters": {SAID}}}',
    "pythonic": '[get_weather(city="Paris")]',
    "mistral": f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {SAID}}}]',
    "deepseek_v3": "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>function"
    f"<\uff5ctool\u2581sep\uff5c>get_weather\n```json\n{SAID}\n```<\uff5ctool\u2581call\u2581end\uff5c>"
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
    "deepseek_v31": "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>"
    f"get_weather<\uff5ctool\u2581sep\uff5c>{SAID}<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>",
    "functiongemma": "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>",
    "internlm": f'<|action_start|><|plugin|>{{"name": "get_weather", "parameters": {SAID}}}<|action_end|>',
    "granite": f'<|tool_call|>[{{"name": "get_weather", "arguments": {SAID}}}]',
    "phi4_mini_json": f'functools[{{"name": "get_weather", "arguments": {SAID}}}]',
}
SPECIAL = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "<|tool_call|>",
        "<think>",
        "</think>",
    ),
    *("<|action_start|>", "<|action_end|>", "<|plugin|>", "<start_function_call>", "<end_function_call>"),
    *(f"<\uff5ctool\u2581{name}\uff5c>" for name in ("calls\u2581begin", "calls\u2581end", "sep")),
    *(f"<\uff5ctool\u2581call\u2581{name}\uff5c>" for name in ("begin", "end")),
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Every format's special tokens, and bytes."""
    plain = {chr(byte): byte for byte in range(256)}
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(plain, [])))
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    return made


def asking() -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    return ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "hi"}], tools=[tool])


@pytest.mark.parametrize("name", WRITTEN)
def test_a_parser_reads_its_format(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    from vllm.tool_parsers import ToolParserManager

    request = asking()
    parser = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)
    found = parser.extract_tool_calls(WRITTEN[name], request=request)
    assert found.tools_called
    assert [(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls] == [
        ("get_weather", {"city": "Paris"})
    ]


def test_every_parser_that_may_be_named_is_there() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert set(ToolParserManager.list_registered()) >= TOOL_PARSERS
    assert set(ReasoningParserManager.list_registered()) >= REASONING_PARSERS


def test_all_that_a_template_calls_for_may_be_named() -> None:
    from profiler import chat_format

    assert set(WRITTEN) == {name for name, _ in chat_format._TOOL_FORMATS}
    assert set(WRITTEN) <= TOOL_PARSERS


def test_a_parser_that_does_not_suit_a_tokenizer_is_left_out(smollm2_folder: Path) -> None:
    """Otherwise the engine would not start: SmolLM2 has neither token."""
    from workers.engine import chat_parsers

    config = replace(
        echo_config(),
        model_path=str(smollm2_folder),
        tool_parser="llama3_json",
        reasoning_parser="deepseek_r1",
    )
    found = chat_parsers.usable(config, smollm2_folder)
    assert (found.tool_parser, found.reasoning_parser) == ("", "")
    kept = chat_parsers.usable(replace(config, tool_parser="hermes", reasoning_parser=""), smollm2_folder)
    assert kept.tool_parser == "hermes"
    with pytest.raises(LaunchError, match=r"requested parser llama3_json.*<\|python_tag\|>.*another parser"):
        chat_parsers.usable(replace(config, needed_parsers=("llama3_json",)), smollm2_folder)


def test_a_variants_template_chooses_its_parsers(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    from workers.engine import chat_parsers

    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    own = tmp_path / "own.jinja"
    own.write_text("{{ tools }}<tool_call>{% if add_generation_prompt %}<think>{% endif %}")
    base = replace(echo_config(), model_path=str(tmp_path), tool_parser="pythonic", reasoning_parser="")
    assert chat_parsers.of_variant(base, own, tokenizer) == ("hermes", "deepseek_r1")
    named = replace(base, needed_parsers=("pythonic",))
    assert chat_parsers.of_variant(named, own, tokenizer) == ("pythonic", "deepseek_r1")
    own.write_text("{{ messages }}")
    assert chat_parsers.of_variant(base, own, tokenizer) == ("pythonic", "")


@pytest.mark.parametrize(
    ("more", "serving"),
    [
        ({}, "reasoning"),
        ({"response_format": {"type": "text"}}, "reasoning"),
        ({"tool_choice": "auto"}, "reasoning"),
        ({"tool_choice": "none"}, "reasoning"),
        ({"response_format": {"type": "json_object"}}, "plain"),
        ({"structured_outputs": {"regex": "a"}}, "plain"),
        ({"tool_choice": "required"}, "plain"),
        ({"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}, "plain"),
    ],
)
async def test_text_that_a_grammar_forces_is_no_reasoning(more: dict[str, Any], serving: str) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    from workers.patches.vllm.app_state import ByGrammar

    class Serving:
        def __init__(self, name: str) -> None:
            self.name = name

        async def create_chat_completion(self, request: Any) -> str:
            return self.name

    asked = ChatCompletionRequest.model_validate({**asking().model_dump(exclude_unset=True), **more})
    chosen = ByGrammar(Serving("reasoning"), Serving("plain"))
    assert await chosen.create_chat_completion(asked) == serving
    assert chosen.name == "reasoning"


@pytest.mark.parametrize(
    ("more", "serving"),
    [
        ({}, "reasoning"),
        ({"tool_choice": {"type": "auto"}}, "reasoning"),
        ({"tool_choice": {"type": "any"}}, "plain"),
        ({"tool_choice": {"type": "tool", "name": "get_weather"}}, "plain"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "plain"),
    ],
)
async def test_messages_that_a_grammar_forces_hold_no_reasoning(more: dict[str, Any], serving: str) -> None:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest

    tools = [{"name": "get_weather", "input_schema": {"type": "object"}}]
    asked = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    assert (
        await _chosen("create_messages", AnthropicMessagesRequest.model_validate({**asked, **more}))
        == serving
    )


@pytest.mark.parametrize(
    ("more", "serving"),
    [
        ({}, "reasoning"),
        ({"text": {"format": {"type": "text"}}}, "reasoning"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}}, "plain"),
        ({"tool_choice": "required"}, "plain"),
        ({"tool_choice": {"type": "function", "name": "get_weather"}}, "plain"),
    ],
)
async def test_responses_that_a_grammar_forces_hold_no_reasoning(more: dict[str, Any], serving: str) -> None:
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    tools = [{"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": False}]
    asked = {"model": "m", "input": "hi", "tools": tools}
    assert await _chosen("create_responses", ResponsesRequest.model_validate({**asked, **more})) == serving


async def _chosen(method: str, request: Any) -> Any:
    """The serving that answers the request by this method."""
    from workers.patches.vllm.app_state import ByGrammar

    def serving(name: str) -> Any:
        async def answer(request: Any) -> str:
            return name

        return SimpleNamespace(**{method: answer})

    return await getattr(ByGrammar(serving("reasoning"), serving("plain")), method)(request)
