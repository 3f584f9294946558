"""The request fields of OpenAI's Responses. Pure.

vLLM keeps responses in the memory of one engine, and a later request may reach another engine. So fields that
need a kept response are refused: the client sends the whole conversation in `input`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controlplane import errors
from controlplane.traffic.field_checks import (
    Check,
    anything,
    boolean,
    exactly,
    integer,
    listed,
    mapping,
    one_of,
    refused,
    shown,
    text,
    unexpected,
)
from controlplane.traffic.openai_fields import (
    CHAT_FIELDS,
    COMMON,
    LOGPROBS,
    LONGEST_NAME,
    MOST_MESSAGES,
    MOST_TOOLS,
    ONLY_TEXT,
)

_NOT_KEPT = "responses are not kept; send the whole conversation in input"
_NO_OWN_TOOLS = "the served models have no tools of their own; define the tool as a function"
_ANY_TEXT = text(2**31 - 1)
# Parts of a message that are text, and the field with the text.
_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_REASONING_PARTS = {"reasoning_text": "text", "summary_text": "text"}

_SHARED = (
    *("model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "watermarking"),
    *("stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
    *("structured_outputs", "user", "request_id", "session_id", "priority", "cache_salt"),
    *("metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    *("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "mm_payload", "return_mm_kwargs"),
)


def _input(name: str, value: Any) -> None:
    if type(value) is not str:
        listed(_item, MOST_MESSAGES)(name, value)


def _item(name: str, value: Any) -> None:
    """One item of a conversation: a message, a call of a function, its result, or earlier reasoning."""
    if type(value) is not dict:
        raise unexpected(name, "a text, or a list of objects", value)
    kind = value.get("type")
    check = _ITEMS.get("message" if kind is None else kind) if type(kind) in (str, type(None)) else None
    if check is None:
        raise errors.InvalidRequest(
            f"{name}: expected items of type {', '.join(_ITEMS)}; got {shown(kind)}", param=name
        )
    check(name, value)


def _message(name: str, value: Any) -> None:
    role = value.get("role")
    one_of("user", "assistant", "system", "developer")(f"{name}.role", role)
    _texts(f"{name}.content", value.get("content"), _PARTS)


def _texts(name: str, value: Any, parts: Mapping[str, str]) -> None:
    """A text, or a list of parts that are text."""
    if type(value) is str:
        return
    if type(value) is not list:
        raise unexpected(name, "a text, or a list of parts", value)
    for part in value:
        kind = part.get("type") if type(part) is dict else None
        if type(kind) is not str or kind not in parts:
            raise errors.InvalidRequest(
                f"{name}: expected parts of type {', '.join(parts)}, because {ONLY_TEXT}; got"
                f" {shown(part if kind is None else kind)}",
                param=name,
            )
        _ANY_TEXT(f"{name}.{parts[kind]}", part.get(parts[kind]))


def _call(name: str, value: Any) -> None:
    for key in ("name", "arguments", "call_id"):
        _ANY_TEXT(f"{name}.{key}", value.get(key))


def _result(name: str, value: Any) -> None:
    text(LONGEST_NAME)(f"{name}.call_id", value.get("call_id"))
    _texts(f"{name}.output", value.get("output"), _PARTS)


def _reasoning(name: str, value: Any) -> None:
    for key in ("summary", "content"):
        if value.get(key) is not None:
            _texts(f"{name}.{key}", value[key], _REASONING_PARTS)


_ITEMS: Mapping[str, Check] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _result,
    "reasoning": _reasoning,
}


def _tool(name: str, value: Any) -> None:
    if type(value) is not dict:
        raise unexpected(name, "objects with a `type`", value)
    if value.get("type") != "function":
        raise errors.InvalidRequest(
            f"{name}: expected tools of type function, because {_NO_OWN_TOOLS}; got"
            f" {shown(value.get('type'))}",
            param=name,
        )
    text(LONGEST_NAME)(f"{name}.name", value.get("name"))
    if value.get("parameters") is not None and type(value["parameters"]) is not dict:
        raise unexpected(f"{name}.parameters", "a JSON schema, as an object", value["parameters"])


def _tool_choice(name: str, value: Any) -> None:
    if type(value) is not dict:
        one_of("none", "auto", "required")(name, value)
    elif value.get("type") != "function" or type(value.get("name")) is not str:
        raise unexpected(name, "none, auto, required, or {type: function, name: ...}", value)


def _format(name: str, value: Any) -> None:
    if type(value) is not dict:
        raise unexpected(name, "an object with a `type`", value)
    one_of("text", "json_object", "json_schema")(f"{name}.type", value.get("type"))
    if value["type"] == "json_schema" and type(value.get("schema")) is not dict:
        raise unexpected(f"{name}.schema", "a JSON schema, as an object", value.get("schema"))


def _store(name: str, value: Any) -> None:
    boolean(name, value)
    if value:
        raise errors.InvalidRequest(f"{name}: expected false, or no value, because {_NOT_KEPT}", param=name)


RESPONSES_FIELDS: Mapping[str, Check] = {
    **{name: COMMON[name] for name in _SHARED},
    "input": _input,
    "instructions": _ANY_TEXT,
    "max_output_tokens": integer(1, 2**31 - 1),
    "text": mapping({"format": _format, "verbosity": one_of("low", "medium", "high")}),
    "reasoning": mapping(
        {
            "effort": CHAT_FIELDS["reasoning_effort"],
            "summary": one_of("auto", "concise", "detailed"),
            "generate_summary": one_of("auto", "concise", "detailed"),
        }
    ),
    "include_reasoning": boolean,
    "tools": listed(_tool, MOST_TOOLS),
    "tool_choice": _tool_choice,
    "parallel_tool_calls": boolean,
    "top_logprobs": LOGPROBS,
    "truncation": one_of("auto", "disabled"),
    "chat_template_kwargs": anything,  # `check_fields` reads it
    "stream_options": mapping({"include_obfuscation": boolean}),  # OpenAI's, without effect here
    "max_tool_calls": integer(1, 2**31 - 1),  # without effect: only tools of the server count
    "include": listed(
        one_of(
            "message.output_text.logprobs",
            # They have no effect here.
            "reasoning.encrypted_content",
            "message.input_image.image_url",
            "code_interpreter_call.outputs",
            "computer_call_output.output.image_url",
            "file_search_call.results",
            "web_search_call.action.sources",
        )
    ),
    "store": _store,
    "background": exactly(False, _NOT_KEPT),
    # --- refused ---
    "previous_response_id": refused(_NOT_KEPT),
    "conversation": refused(_NOT_KEPT),
    "previous_input_messages": refused("send earlier messages in input"),
    "prompt": refused("prompts are not kept; send instructions and input"),
    "enable_response_messages": exactly(False, "answers do not repeat their prompts"),
    "mm_processor_kwargs": refused(ONLY_TEXT),
    "media_io_kwargs": refused(ONLY_TEXT),
    "messages": refused("this call takes input; send messages to /v1/chat/completions"),
    "max_tokens": refused("it is a field of other calls; send max_output_tokens"),
    "max_completion_tokens": refused("it is a field of other calls; send max_output_tokens"),
}
