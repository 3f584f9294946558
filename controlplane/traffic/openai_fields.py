"""The request fields of OpenAI's chats and completions, which other endpoints share in part. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controlplane import errors
from controlplane.traffic.field_checks import (
    Check,
    among,
    anything,
    boolean,
    either,
    exactly,
    integer,
    keyed,
    listed,
    mapping,
    number,
    one_of,
    refused,
    shown,
    text,
    unexpected,
)

LONGEST_NAME = 256  # characters of an id, or of a name of a session or user
LONGEST_WORD = 1024  # characters of a stop sequence, and of a value for a template
MOST_LOGPROBS = 20  # of each token, as in vLLM's --max-logprobs
MOST_TOOLS = 1024
MOST_MESSAGES = 16_384
LONGEST_PATTERN = 64  # tokens; the engine searches the pattern after each token
LARGEST_INTERVAL = 1024
COUNT = integer(0, 2**31 - 1)

# Parts of a message that are text. For other parts the engine's server would fetch and decode files.
_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}

ONLY_TEXT = "the served models read and write only text"
DISAGGREGATED = "it moves KV blocks between engines, which Ostinato does itself"
OF_RENDERING = "it belongs to vLLM's /render calls, which Ostinato does not serve"
_GUIDED = "vLLM ignores it since 0.12; send structured_outputs with json, regex, choice or grammar"


def _nothing_empty(name: str, value: Any) -> None:
    if not value:
        raise unexpected(name, "a text that is not empty", value)


def word(name: str, value: Any) -> None:
    text(LONGEST_WORD)(name, value)
    _nothing_empty(name, value)


def _prompt(name: str, value: Any) -> None:
    """A text, tokens, or a list of either."""
    if type(value) is str:
        return
    if type(value) is not list:
        raise unexpected(name, "a text, a list of token ids, or a list of either", value)
    kinds = set(map(type, value))
    if kinds <= {str} or kinds <= {int}:
        return
    if kinds != {list} or not all(set(map(type, tokens)) <= {int} for tokens in value):
        raise unexpected(name, "texts alone, or lists of token ids alone", value)


def message(name: str, value: Any) -> None:
    if type(value) is not dict or type(value.get("role")) is not str:
        raise unexpected(name, "objects with a `role`", value)
    if len(value["role"]) > LONGEST_NAME:
        raise unexpected(f"{name}.role", f"a text of at most {LONGEST_NAME} characters", value["role"])
    content = value.get("content")
    if type(content) is list:
        for part in content:
            _part(name, part)
    elif content is not None and type(content) is not str:
        raise unexpected(f"{name}.content", "a text, or a list of parts", content)
    if value.get("tool_calls") is not None:
        listed(_tool_call, MOST_TOOLS)(f"{name}.tool_calls", value["tool_calls"])


def _part(name: str, value: Any) -> None:
    if type(value) is str:
        return
    kind = value.get("type") if type(value) is dict else None
    if kind is None or not among(_PARTS, kind):
        raise errors.InvalidRequest(
            f"{name}: expected parts of type text, because {ONLY_TEXT}; got"
            f" {shown(value if kind is None else kind)}",
            param=name,
        )
    if type(value.get(_PARTS[kind])) is not str:
        raise unexpected(f"{name}.{_PARTS[kind]}", "a text", value.get(_PARTS[kind]))


def _tool_call(name: str, value: Any) -> None:
    if type(value) is not dict or type(value.get("function")) is not dict:
        raise unexpected(name, "objects with a `function`", value)


def tool(name: str, value: Any) -> None:
    if type(value) is not dict or type(value.get("function")) is not dict:
        raise unexpected(name, "objects with a `function`", value)
    if type(value["function"].get("name")) is not str:
        raise unexpected(f"{name}.function.name", "a text", value["function"].get("name"))


def _tool_choice(name: str, value: Any) -> None:
    if type(value) is not dict:
        one_of("none", "auto", "required")(name, value)
    elif type(value.get("function")) is not dict:
        raise unexpected(name, "none, auto, required, or an object with a `function`", value)


def _response_format(name: str, value: Any) -> None:
    if type(value) is not dict:
        raise unexpected(name, "an object with a `type`", value)
    one_of("text", "json_object", "json_schema", "structural_tag")(f"{name}.type", value.get("type"))


def json_schema(name: str, value: Any) -> None:
    if type(value) not in (str, dict):
        raise unexpected(name, "a JSON schema, as an object or a text", value)


_DOCUMENT = keyed(text(2**31 - 1))
LOGPROBS = integer(0, MOST_LOGPROBS)
TOKENS = listed(integer())

STRUCTURED_OUTPUTS: Mapping[str, Check] = {
    "json": json_schema,
    "regex": text(2**31 - 1),
    "choice": listed(text(2**31 - 1)),
    "grammar": text(2**31 - 1),
    "json_object": boolean,
    "structural_tag": text(2**31 - 1),
    "disable_any_whitespace": boolean,
    "disable_additional_properties": boolean,
    "whitespace_pattern": text(LONGEST_WORD),
}
STREAM_OPTIONS: Mapping[str, Check] = {
    "include_usage": boolean,
    "continuous_usage_stats": boolean,
    "include_obfuscation": boolean,  # OpenAI's, without effect here
}
REPETITION_DETECTION: Mapping[str, Check] = {
    "max_pattern_size": integer(0, LONGEST_PATTERN),
    "min_pattern_size": integer(0, LONGEST_PATTERN),
    "min_count": integer(0, 2**31 - 1),
}

# The fields of both calls.
COMMON: Mapping[str, Check] = {
    "model": anything,  # `parse_body` has read it before
    "stream": boolean,
    "stream_options": mapping(STREAM_OPTIONS),
    "stream_interval": integer(1, LARGEST_INTERVAL),
    # --- sampling ---
    "n": integer(1, 2**31 - 1),
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "top_k": integer(-1, 2**31 - 1),
    "min_p": number(0, 1),
    "seed": integer(),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(0, 1e6),
    "length_penalty": number(-1e6, 1e6),  # only for a beam search
    "logit_bias": keyed(number()),
    "allowed_token_ids": TOKENS,
    "bad_words": listed(word),
    "use_beam_search": exactly(
        False, "a beam search is many requests, which the tenant's share would not count"
    ),
    "watermarking": exactly(False, "watermarks are not supported"),
    # --- where an answer ends ---
    "max_tokens": COUNT,
    "min_tokens": COUNT,
    "stop": either(word, listed(word)),
    "stop_token_ids": TOKENS,
    "ignore_eos": boolean,
    "repetition_detection": mapping(REPETITION_DETECTION),
    "thinking_token_budget": integer(-1, 2**31 - 1),
    # --- what an answer is, and shows ---
    "response_format": _response_format,
    "structured_outputs": mapping(STRUCTURED_OUTPUTS),
    "echo": boolean,
    "prompt_logprobs": LOGPROBS,
    "logprob_token_ids": TOKENS,
    "include_stop_str_in_output": boolean,
    "skip_special_tokens": boolean,
    "spaces_between_special_tokens": boolean,
    "return_tokens_as_token_ids": boolean,
    "return_token_ids": boolean,
    # --- how a prompt is read ---
    "add_special_tokens": boolean,
    "truncate_prompt_tokens": integer(-1, 2**31 - 1),
    "truncation_side": one_of("left", "right"),
    # --- the client, and the purpose ---
    "user": text(LONGEST_WORD),
    "request_id": text(LONGEST_NAME),
    "session_id": text(LONGEST_NAME),
    "priority": integer(),  # goes into the request's terms; the engine does not see it
    "cache_salt": text(2**31 - 1),  # appended to the tenant's own
    # --- OpenAI's, without effect here ---
    "store": boolean,
    "metadata": keyed(text(LONGEST_WORD), 64),
    "service_tier": text(LONGEST_NAME),  # goes into the request's terms
    "prompt_cache_key": text(LONGEST_WORD),  # goes into the request's terms
    "prompt_cache_retention": text(LONGEST_NAME),
    "prompt_cache_options": anything,
    "safety_identifier": text(LONGEST_WORD),
    # --- refused ---
    "kv_transfer_params": refused(DISAGGREGATED),
    "ec_transfer_params": refused(DISAGGREGATED),
    "vllm_xargs": refused("it reaches extensions of the engine; use the request's own fields"),
    "routed_experts_prompt_start": refused("engines return no experts"),
    "return_token_offsets": refused(OF_RENDERING),
    "mm_payload": refused(OF_RENDERING),
    "return_mm_kwargs": refused(OF_RENDERING),
    **{
        f"guided_{name}": refused(_GUIDED)
        for name in (
            "json",
            "regex",
            "choice",
            "grammar",
            "json_object",
            "decoding_backend",
            "whitespace_pattern",
        )
    },
}

COMPLETION_FIELDS: Mapping[str, Check] = {
    **COMMON,
    "prompt": _prompt,
    "logprobs": LOGPROBS,
    "suffix": text(2**31 - 1),
    "best_of": exactly(1, "Ostinato does not choose the best of several answers; n returns all of them"),
    "prompt_embeds": refused(f"{ONLY_TEXT}; send a prompt"),
    "max_completion_tokens": refused("it is a field of /v1/chat/completions; send max_tokens"),
    "messages": refused("this call takes a prompt; send messages to /v1/chat/completions"),
}

CHAT_FIELDS: Mapping[str, Check] = {
    **COMMON,
    "messages": listed(message, MOST_MESSAGES),
    "max_completion_tokens": COUNT,
    "logprobs": boolean,
    "top_logprobs": LOGPROBS,
    "tools": listed(tool, MOST_TOOLS),
    "tool_choice": _tool_choice,
    "parallel_tool_calls": boolean,
    "reasoning_effort": one_of("none", "minimal", "low", "medium", "high", "xhigh", "max"),
    "include_reasoning": boolean,
    "add_generation_prompt": boolean,
    "continue_final_message": boolean,
    "documents": listed(_DOCUMENT, MOST_TOOLS),
    "chat_template_kwargs": anything,  # `_check_template_arguments`
    "return_prompt_text": boolean,
    "verbosity": one_of("low", "medium", "high"),  # a hint that models here ignore
    "prediction": anything,  # a hint that models here ignore
    "modalities": listed(one_of("text")),
    "prompt": refused("this call takes messages; send a prompt to /v1/completions"),
    "chat_template": refused(
        "the model's own template is used; to change it, put a template into the model's or variant's folder"
    ),
    "mm_processor_kwargs": refused(ONLY_TEXT),
    "media_io_kwargs": refused(ONLY_TEXT),
    "audio": refused(ONLY_TEXT),
    "web_search_options": refused("the served models do not search the web; give the model a tool for it"),
    "moderation": refused("Ostinato does not moderate answers"),
    "functions": refused("OpenAI replaced it; send tools"),
    "function_call": refused("OpenAI replaced it; send tool_choice"),
    "return_assistant_tokens_mask": refused(OF_RENDERING),
}
