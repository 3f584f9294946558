"""Limits of grammars, wherever in a request their parts are: in schemas, tags, tools. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from controlplane.traffic.repetitions import check_ebnf, check_regex

# Optional properties of one object: xgrammar needs 0.7 s to compile 500, and more than 8 s for 2,000.
MOST_OPTIONAL = 512
_REGEXES = ("regex", "pattern", "whitespace_pattern")
_EBNF = ("grammar", "ebnf")
_WRITTEN = ("json", "structural_tag", "json_schema", "schema")  # JSON, perhaps within a text


def check_grammar(value: Any) -> None:
    """Errors: ValueError, naming the part that takes too long. Values that are not grammars may pass."""
    for inner in _objects(value):
        for name in _REGEXES:
            if isinstance(inner.get(name), str):
                check_regex(inner[name])
        for name in _EBNF:
            if isinstance(inner.get(name), str):
                check_ebnf(inner[name])
        if isinstance(patterns := inner.get("patternProperties"), dict):
            for pattern in patterns:
                check_regex(pattern)
        _check_properties(inner)


def _check_properties(schema: dict[str, Any]) -> None:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or len(properties) <= MOST_OPTIONAL:
        return
    named = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    if (optional := len(properties.keys() - named)) > MOST_OPTIONAL:
        raise ValueError(
            f"it has an object with {optional} optional properties, but at most {MOST_OPTIONAL} are allowed"
        )


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a value, including objects inside texts that hold JSON."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, list):
            left += each
        elif isinstance(each, dict):
            yield each
            left += each.values()
            left += [read for name in _WRITTEN if (read := _read(each.get(name))) is not None]


def _read(text: Any) -> Any:
    if not isinstance(text, str):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None  # the engine refuses it
