"""Schemas with patterns of property names: answers follow them, as the `jsonschema` package reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from workers.group.grammar_process import Backends

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BESIDE_PROPERTIES = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
    "patternProperties": {"^n_": {"type": "integer"}, "^s_": {"type": "string", "maxLength": 3}},
    "required": ["name"],
    "additionalProperties": False,
}
PATTERN_ALONE = {
    "type": "object",
    "patternProperties": {"^n_[a-z]+$": {"type": "integer"}},
    "additionalProperties": False,
}
VALUES: tuple[Any, ...] = (
    *({"name": "a"}, {"name": "a", "size": 3}, {"name": "a", "n_x": 3}, {"name": "a", "s_": "abc"}),
    *({"name": "a", "size": 1, "n_": 5, "s_x": ""}, {"n_x": 3}, {"n_abc": 1, "n_d": 2}, {}),
    *({"name": "a", "n_x": "3"}, {"name": "a", "s_": "abcd"}, {"name": 3}, {"size": 3}, {"n_X": 3}),
    *({"name": "a", "other": 1}, {"x_n": 3}, {"n_x": 3.5}, [], 3),
)


@pytest.fixture(scope="module")
def backends(smollm2_folder: Path) -> Backends:
    return Backends.of(str(smollm2_folder), "hf", 49_152)


def allows(backends: Backends, outputs: Any, value: Any) -> bool:
    """Whether the grammar allows this text and its end. A grammar that refused a text stays in that state."""
    from vllm.v1.structured_output.request import get_structured_output_key

    compiled = backends.of_name(outputs._backend).compile_grammar(*get_structured_output_key(outputs))
    tokenizer = backends._tokenizer
    tokens = tokenizer.encode(json.dumps(value), add_special_tokens=False)
    return bool(compiled.accept_tokens("", tokens) and compiled.accept_tokens("", [tokenizer.eos_token_id]))


@pytest.mark.parametrize(
    ("schema", "backend"), [(BESIDE_PROPERTIES, "guidance"), (PATTERN_ALONE, "xgrammar")]
)
def test_names_that_match_a_pattern_have_its_values(
    backends: Backends, schema: dict[str, Any], backend: str
) -> None:
    outputs = backends.validated({"json": schema})
    assert outputs._backend == backend
    validator = jsonschema.Draft202012Validator(schema)
    allowed = {json.dumps(value): allows(backends, outputs, value) for value in VALUES}
    assert allowed == {json.dumps(value): validator.is_valid(value) for value in VALUES}
