"""Which parsers a chat template calls for, by what known models' templates say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from profiler.chat_format import ChatFormat, chat_format, read_chat_format, variant_format

# The words of each template by which its format is known, as published; what stands between is left out.
SHOWN = "{%- if tools %}{{- tools | tojson }}{%- endif %}"
CHATML = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
HYBRID = (
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and "
    "enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
HERMES = SHOWN + '{{- \'<tool_call>\\n{"name": "\' + tool_call.name + \'", "arguments": \' }}'
DISTILLED = (
    "{% for tool in message['tool_calls'] %}{{'<\uff5ctool\u2581calls\u2581begin\uff5c>```json'}}{% endfor %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{% if add_generation_prompt and not ns.is_tool %}{{'<\uff5cAssistant\uff5c><think>\\n'}}{% endif %}"
)
KNOWN = [
    ("Qwen2.5-Instruct", "qwen2", HERMES + CHATML, "hermes", ""),
    ("Qwen3", "qwen3", HERMES + HYBRID, "hermes", "qwen3"),
    ("Qwen3-30B-A3B", "qwen3_moe", HERMES + HYBRID, "hermes", "qwen3"),
    ("Qwen3-Instruct-2507", "qwen3", HERMES + CHATML, "hermes", ""),
    (
        "Qwen3-Thinking-2507",
        "qwen3",
        HERMES + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}",
        "hermes",
        "deepseek_r1",
    ),
    ("Qwen3-Coder", "qwen3_moe", SHOWN + "<tool_call>\n<function=example>" + CHATML, "qwen3_coder", ""),
    ("Llama-3.1", "llama", SHOWN + "{{- '<|python_tag|>' + tool_call.name + '.call(' }}", "llama3_json", ""),
    (
        "Llama-3.2-1B",
        "llama",
        SHOWN + 'Respond in the format {"name": function name, "parameters": dictionary of argument name and '
        "its value}. Do not use variables.",
        "llama3_json",
        "",
    ),
    ("Llama-3.2, in Python", "llama", SHOWN + "[func_name1(params_name1=params_value1)]", "pythonic", ""),
    ("Mistral-v0.3", "mistral", SHOWN + "[AVAILABLE_TOOLS] {{ '[TOOL_CALLS] [' }}", "mistral", ""),
    ("Magistral", "mistral", SHOWN + "[THINK]{{ '[TOOL_CALLS]' }}", "mistral", "mistral"),
    ("Phi-4-mini", "phi3", "{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}", "phi4_mini_json", ""),
    ("FunctionGemma", "gemma3_text", SHOWN + "<start_function_call>call:", "functiongemma", ""),
    # It reasons, and its template shows it no tools.
    ("R1-Distill-Qwen", "qwen2", DISTILLED, "", "deepseek_r1"),
    (
        "QwQ-32B",
        "qwen2",
        HERMES + "{%- if add_generation_prompt %}{{- '<think>\\n' }}",
        "hermes",
        "deepseek_r1",
    ),
    ("Gemma-3", "gemma3_text", "<start_of_turn>{{ role }}", "", ""),
    ("SmolLM2", "llama", "{% for message in messages %}<|im_start|>{% endfor %}" + CHATML, "", ""),
    ("Llama-2, a base model", "llama", "", "", ""),
]


@pytest.mark.parametrize(
    ("family", "template", "tools", "reasoning"),
    [known[1:] for known in KNOWN],
    ids=[known[0] for known in KNOWN],
)
def test_a_template_s_format_is_known(family: str, template: str, tools: str, reasoning: str) -> None:
    found = chat_format(template, family)
    assert (found.tool_parser, found.reasoning_parser) == (tools, reasoning)
    assert found.tool_reason
    assert found.reasoning_reason


def test_a_template_that_may_not_think_gets_no_reasoning_parser() -> None:
    """A parser of reasoning would take the whole of an answer for it."""
    assert chat_format(HERMES + HYBRID, "llama").reasoning_parser == ""


def write(folder: Path, **files: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_a_template_is_found_in_its_possible_files(tmp_path: Path) -> None:
    """The order in which transformers looks for it."""
    in_config = json.dumps({"chat_template": HERMES})
    named = json.dumps(
        {"chat_template": [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": HERMES}]}
    )
    folders = {
        "a file": write(tmp_path / "1", chat_template__jinja=HERMES),
        "a file of JSON": write(tmp_path / "2", chat_template__json=in_config),
        "the tokenizer's config": write(tmp_path / "3", tokenizer_config__json=in_config),
        "one of several": write(tmp_path / "4", tokenizer_config__json=named),
    }
    assert {
        where: read_chat_format(folder).tool_parser for where, folder in folders.items()
    } == dict.fromkeys(folders, "hermes")
    both = write(tmp_path / "5", chat_template__jinja=CHATML, tokenizer_config__json=in_config)
    assert read_chat_format(both).tool_parser == ""
    assert read_chat_format(write(tmp_path / "6")) == ChatFormat(
        "", "it has no chat template", "", "it has no chat template"
    )
    assert read_chat_format(write(tmp_path / "7", tekken__json="{}")).tool_parser == "mistral"


def test_a_variant_is_read_as_its_own_template_asks_and_else_as_its_base() -> None:
    base = chat_format(HERMES + CHATML, "qwen2")
    distilled = variant_format(DISTILLED, "qwen2", base)
    assert (distilled.tool_parser, distilled.reasoning_parser) == ("hermes", "deepseek_r1")
    assert distilled.tool_reason == (
        "as its base, because its own chat template has no known format (its chat template has <tool_call>)"
    )
    assert distilled.reasoning_reason == "its chat template is DeepSeek's, and has </think>"
    plain = variant_format("", "qwen2", base)
    assert (plain.tool_parser, plain.reasoning_parser) == ("hermes", "")
    assert plain.tool_reason.startswith("as its base, because it has no chat template of its own")
    other = variant_format(SHOWN + "[func_name1(params_name1=params_value1)]", "llama", base)
    assert (other.tool_parser, other.tool_reason) == ("pythonic", "its chat template has [func_name1(")
