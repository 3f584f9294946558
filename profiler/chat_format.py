"""How a model writes tool calls and reasoning, read from its chat template.

The names are those of vLLM's parsers. A template matches a format if it contains every text that the format
needs; where two formats share their texts, the model's family decides. Templates are read as text, never run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiler.files import is_file, read_json, read_text
from profiler.model_files import TEMPLATES

MAX_TEMPLATE_BYTES = 1 << 20  # the longest known templates have 30 KB

# Each parser, and the texts that a template of its format contains. The first parser with all texts is
# chosen.
_TOOL_FORMATS = (
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek_v3", ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "```json")),
    ("deepseek_v31", ("<\uff5ctool\u2581calls\u2581begin\uff5c>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("internlm", ("<|action_start|>", "<|plugin|>")),
    ("granite", ("<|tool_call|>",)),
    ("phi4_mini_json", ("<|tool|>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('"parameters": dictionary of argument name',)),
)
_SHOWS_TOOLS = re.compile(r"\btools\b")
DEFAULT = "default"  # the name of a template without other templates
_QWEN3 = frozenset({"qwen3", "qwen3_moe"})


@dataclass(frozen=True)
class ChatFormat:
    """vLLM's parsers for a model's answers, "" where none is known, and the reason for each choice."""

    tool_parser: str = ""
    tool_reason: str = ""
    reasoning_parser: str = ""
    reasoning_reason: str = ""


def read_chat_format(folder: Path) -> ChatFormat:
    """The chat format of the checkpoint in `folder`. Raises CheckpointError when its template is
    unreadable."""
    family = family_of(folder)
    template = "\n".join(named_templates(folder).values())
    if not template and is_file(folder / "tekken.json"):
        return ChatFormat("mistral", "it has Mistral's own tokenizer", "", "no chat template shows reasoning")
    return chat_format(template, family)


def family_of(folder: Path) -> str:
    """The `model_type` of the checkpoint in `folder`. Raises CheckpointError."""
    return str(read_json(folder / "config.json").get("model_type", ""))


def chat_format(template: str, family: str = "") -> ChatFormat:
    """The format of the answers to a template with this text, for a model of this `model_type`."""
    if not template:
        return ChatFormat("", "it has no chat template", "", "it has no chat template")
    return ChatFormat(*_tool_parser(template), *_reasoning_parser(template, family))


def variant_format(own: str, family: str, base: ChatFormat) -> ChatFormat:
    """The parsers for a variant's answers. `own` is its chat template; "" if it has none.

    Where its own template calls for no parser, the base's parser is used.
    """
    mine = chat_format(own, family)
    why = "its own chat template has no known format" if own else "it has no chat template of its own"
    tools, reasoning = (
        (parser, reason) if parser else (theirs, f"as its base, because {why} ({because})")
        for parser, reason, theirs, because in (
            (mine.tool_parser, mine.tool_reason, base.tool_parser, base.tool_reason),
            (mine.reasoning_parser, mine.reasoning_reason, base.reasoning_parser, base.reasoning_reason),
        )
    )
    return ChatFormat(*tools, *reasoning)


def _tool_parser(template: str) -> tuple[str, str]:
    if not _SHOWS_TOOLS.search(template):
        return "", "its chat template does not show tools to the model"
    for parser, words in _TOOL_FORMATS:
        if all(word in template for word in words):
            return parser, f"its chat template has {' and '.join(words)}"
    return "", "its chat template has no known format of tool calls"


def _reasoning_parser(template: str, family: str) -> tuple[str, str]:
    if "[THINK]" in template:
        return "mistral", "its chat template has [THINK]"
    if "<think>" in template and "enable_thinking" in template and family in _QWEN3:
        return "qwen3", f"its chat template has <think> and enable_thinking, and it is a {family}"
    if "<\uff5cAssistant\uff5c>" in template and "</think>" in template:
        return "deepseek_r1", "its chat template is DeepSeek's, and has </think>"
    prompt = template.rpartition("add_generation_prompt")[2]
    if "<think>" in prompt and "</think>" not in prompt and "enable_thinking" not in prompt:
        return "deepseek_r1", "its chat template begins each answer with <think>"
    return "", "its chat template shows no reasoning"


def named_templates(folder: Path) -> dict[str, str]:
    """The chat templates of a folder by name, found as transformers finds them: templates in files of their
    own replace the tokenizer's. Raises CheckpointError."""
    own = {DEFAULT: folder / "chat_template.jinja"}
    if (folder / TEMPLATES).is_dir():
        own |= {path.stem: path for path in sorted((folder / TEMPLATES).glob("*.jinja"))}
    if found := {name: read_text(file, MAX_TEMPLATE_BYTES) for name, file in own.items() if is_file(file)}:
        return found
    for name in ("chat_template.json", "tokenizer_config.json"):
        if is_file(folder / name) and (found := _of(read_json(folder / name))):
            return found
    return {}


def _of(config: Mapping[str, Any]) -> dict[str, str]:
    """The templates in a tokenizer's config, by name: one template, or several with names."""
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {str(each.get("name")): each.get("template") for each in found if isinstance(each, dict)}
        return {name: text for name, text in named.items() if isinstance(text, str)}
    return {DEFAULT: found} if isinstance(found, str) and found else {}
