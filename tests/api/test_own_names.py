"""Errors name the fields of the call that was made, not those of the calls that carry it out."""

from __future__ import annotations

import pytest

from controlplane import errors
from controlplane.api.own_names import ADAPTERS, INFERENCE, translated
from testkit.api.installations import Installation, Start

# The texts of vLLM 0.32 and 0.26.
TOO_LONG = (
    "This model's maximum context length is 64 tokens. However, you requested 8 output tokens and your"
    " prompt contains at least 57 input tokens, for a total of at least 65 tokens. Please reduce the length"
    " of the input prompt or the number of requested output tokens. (parameter=input_tokens, value=57)"
)


@pytest.fixture(scope="module")
def served(start_shared: Start) -> Installation:
    made = start_shared()
    made.up()
    return made


def test_a_prompt_that_is_too_long_is_an_input_text() -> None:
    told = translated(errors.PromptTooLong(TOO_LONG, param="input_tokens"), INFERENCE)
    assert (told.code, told.param) == ("context_length_exceeded", "inputText")
    assert told.message.endswith("(parameter=inputText, value=57)")


def test_a_field_without_a_mapping_keeps_its_name(served: Installation) -> None:
    error = errors.InvalidRequest("temperature: expected 0 to 2", param="temperature")
    assert translated(error, INFERENCE) is error
    late = errors.Unavailable("`max_tokens` is late", param="max_tokens", retry_after_s=7)
    told = translated(late, INFERENCE)
    assert (told.message, told.param, told.retry_after_s) == (
        "`maxOutputLength` is late",
        "maxOutputLength",
        7,
    )


def test_a_refusal_of_a_chat_names_the_chat_format(served: Installation) -> None:
    """Only where a chat was asked for: else the text is completed."""
    error = translated(errors.NoChatTemplate("no template", param="format"), INFERENCE)
    assert error.param == "format"


def test_adapter_calls_name_their_own_fields(served: Installation) -> None:
    path, found = "/v1/load_lora_adapter", {}
    for case, body in {
        "no such folder": {"lora_name": "a", "lora_path": str(served.files / "nothing")},
        "not allowed": {"lora_name": "a", "lora_path": "/etc"},
        "another's shape": {"lora_name": "a", "lora_path": str(served.files / "shape")},
        "taken": {"lora_name": "base", "lora_path": str(served.files / "v1")},
        "no base": {"lora_name": "a", "lora_path": str(served.files / "v1"), "base_model_name": "nobody"},
    }.items():
        found[case] = served.post(path, body).json()["error"]["param"]
    gone = served.post("/v1/unload_lora_adapter", {"lora_name": "nobody"}).json()["error"]["param"]
    assert found == {
        "no such folder": "lora_path",
        "not allowed": "lora_path",
        "another's shape": "lora_path",
        "taken": "lora_name",
        "no base": "base_model_name",
    }
    assert gone == "lora_name"


def test_fields_of_both_are_known() -> None:
    """Each name in an error is a name that the call takes."""
    from controlplane.management.schemas.models import InferenceModelRequest, LoadLoraAdapterRequest

    assert set(INFERENCE.values()) <= set(InferenceModelRequest.model_fields)
    assert set(ADAPTERS.values()) <= set(LoadLoraAdapterRequest.model_fields)
