"""The request fields of Anthropic's Messages. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controlplane import errors
from controlplane.traffic.field_checks import (
    Check,
    anything,
    boolean,
    integer,
    listed,
    mapping,
    number,
    one_of,
    refused,
    shown,
    text,
    unexpected,
)
from controlplane.traffic.openai_fields import (
    COMMON,
    LONGEST_NAME,
    MOST_MESSAGES,
    MOST_TOOLS,
    ONLY_TEXT,
    word,
)

_NO_OWN_TOOLS = "the served models have no tools of their own; send a name and an input_schema"
_ANY_TEXT = text(2**31 - 1)
_NAME = text(LONGEST_NAME)


def _blocks(of: Mapping[str, Check]) -> Check:
    """A text, or a list of blocks of these types. Other fields of a block (`cache_control`, `citations`) have
    no effect."""

    def check(name: str, value: Any) -> None:
        if type(value) is not str:
            listed(block)(name, value)

    def block(name: str, value: Any) -> None:
        kind = value.get("type") if type(value) is dict else None
        if type(kind) is not str or kind not in of:
            raise errors.InvalidRequest(
                f"{name}: expected blocks of type {', '.join(of)}, because {ONLY_TEXT}; got"
                f" {shown(value if kind is None else kind)}",
                param=name,
            )
        of[kind](name, value)

    return check


def _text_block(name: str, value: Any) -> None:
    _ANY_TEXT(f"{name}.text", value.get("text"))


def _thinking_block(name: str, value: Any) -> None:
    _ANY_TEXT(f"{name}.thinking", value.get("thinking"))


def _tool_use(name: str, value: Any) -> None:
    _NAME(f"{name}.id", value.get("id"))
    _NAME(f"{name}.name", value.get("name"))
    if type(value.get("input")) is not dict:
        raise unexpected(f"{name}.input", "an object", value.get("input"))


def _tool_result(name: str, value: Any) -> None:
    _NAME(f"{name}.tool_use_id", value.get("tool_use_id"))
    if value.get("content") is not None:
        _SYSTEM(f"{name}.content", value["content"])


_SYSTEM = _blocks({"text": _text_block})
_CONTENT = _blocks(
    {
        "text": _text_block,
        "tool_use": _tool_use,
        "tool_result": _tool_result,
        "thinking": _thinking_block,
        "redacted_thinking": anything,  # the engine leaves it out
    }
)


def _message(name: str, value: Any) -> None:
    if type(value) is not dict:
        raise unexpected(name, "objects with a `role` and `content`", value)
    one_of("user", "assistant", "system")(f"{name}.role", value.get("role"))
    _CONTENT(f"{name}.content", value.get("content"))


def _tool(name: str, value: Any) -> None:
    if type(value) is not dict:
        raise unexpected(name, "objects with a `name` and an `input_schema`", value)
    if value.get("type") not in (None, "custom"):
        raise errors.InvalidRequest(
            f"{name}: expected tools of type custom, because {_NO_OWN_TOOLS}; got {shown(value['type'])}",
            param=name,
        )
    _NAME(f"{name}.name", value.get("name"))
    if type(value.get("input_schema")) is not dict:
        raise unexpected(f"{name}.input_schema", "a JSON schema, as an object", value.get("input_schema"))


def _tool_choice(name: str, value: Any) -> None:
    if type(value) is not dict:
        raise unexpected(name, "an object with a `type`", value)
    one_of("auto", "any", "tool", "none")(f"{name}.type", value.get("type"))
    if value["type"] == "tool":
        _NAME(f"{name}.name", value.get("name"))
    if value.get("disable_parallel_tool_use") is not None:
        boolean(f"{name}.disable_parallel_tool_use", value["disable_parallel_tool_use"])


def _thinking(name: str, value: Any) -> None:
    if type(value) is not dict:
        raise unexpected(name, "an object with a `type`", value)
    one_of("enabled", "disabled", "adaptive")(f"{name}.type", value.get("type"))
    if value["type"] == "enabled":
        integer(1, 2**31 - 1)(f"{name}.budget_tokens", value.get("budget_tokens"))


def _format(name: str, value: Any) -> None:
    if type(value) is not dict:
        raise unexpected(name, "an object with a `type` and a `schema`", value)
    one_of("json_schema")(f"{name}.type", value.get("type"))
    if type(value.get("schema")) is not dict:
        raise unexpected(f"{name}.schema", "a JSON schema, as an object", value.get("schema"))


_OUTPUT = mapping({"effort": one_of("low", "medium", "high", "xhigh", "max"), "format": _format})

# The fields that say what the prompt is, also for counting its tokens.
COUNT_FIELDS: Mapping[str, Check] = {
    "model": anything,  # `parse_body` has read it before
    "messages": listed(_message, MOST_MESSAGES),
    "system": _SYSTEM,
    "tools": listed(_tool, MOST_TOOLS),
    "tool_choice": _tool_choice,
    "thinking": _thinking,
    "output_config": _OUTPUT,
    "chat_template_kwargs": anything,  # `check_fields` reads it
    # --- Anthropic's, without effect here ---
    "cache_control": anything,
    "context_management": anything,
    "mcp_servers": listed(refused(_NO_OWN_TOOLS)),
}
_SHARED = (
    *("stream", "top_k", "top_p", "cache_salt", "watermarking"),
    *("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "mm_payload", "return_mm_kwargs"),
)
MESSAGES_FIELDS: Mapping[str, Check] = {
    **COUNT_FIELDS,
    **{name: COMMON[name] for name in _SHARED},
    "max_tokens": integer(1, 2**31 - 1),
    "temperature": number(0, 2),
    "stop_sequences": listed(word),
    "metadata": mapping({"user_id": _ANY_TEXT}),
    # --- Anthropic's, without effect here ---
    "service_tier": one_of("auto", "standard_only"),
    "inference_geo": text(LONGEST_NAME),
    "container": refused("the served models run no code; define a tool for it"),
}
