"""Read a what-if file within a second, whatever its bytes are; numbers and text stay as written.

The format is YAML with JSON's scalars. YAML 1.1 would read `2020-13-45` as a date, `1:30` as ninety and `no`
as false, although a name is meant. PyYAML builds nested values by recursion and repeats the values of
aliases, so depth and size are checked first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from placement.solver.schema import ScenarioError

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
MAX_VALUES = 40_000  # the values of an alias count at each use

_CLOSING = (yaml.SequenceEndEvent, yaml.MappingEndEvent)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # C is ten times as fast
    """A loader that knows null, true and false, integers and decimal numbers; everything else is text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


for _tag, _pattern, _first in (
    ("null", r"~|null|", "~n\0"),
    ("bool", r"true|false", "tf"),
    ("int", r"[-+]?[0-9]{1,18}", "-+0123456789"),
    ("merge", r"<<", "<"),
    ("float", r"[-+]?([0-9]+\.?[0-9]*([eE][-+]?[0-9]+)?|\.inf)|\.nan", "-+.0123456789"),
):
    for _character in _first:
        _Loader.yaml_implicit_resolvers.setdefault("" if _character == "\0" else _character, []).append(
            (f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"))
        )


def read(path: Path) -> Any:
    """The file's content, not yet checked against the schema. Raises ScenarioError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        text = raw.decode()
    except OSError as error:
        raise ScenarioError(
            f"the YAML file cannot be read: {error.strerror}; check its path and permissions"
        ) from error
    except ValueError as error:
        raise ScenarioError(f"expected a YAML file in UTF-8: {error}") from error
    if len(raw) > MAX_BYTES:
        raise ScenarioError(f"expected a YAML file of at most {MAX_BYTES} bytes, got more")
    return parse(text)


def parse(text: str) -> Any:
    """Parse a what-if file's text. Raises ScenarioError with the line."""
    try:
        _check_events(text)
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check_size(node)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except ScenarioError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise ScenarioError(f"expected a YAML file: {where}{error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ScenarioError(f"expected a YAML file: {error}") from error


def _check_events(text: str) -> None:
    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=_Loader)):
        if number > 2 * MAX_VALUES:
            raise ScenarioError(f"line {_line(event)}: expected at most {MAX_VALUES} values, got more")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, _CLOSING)
        if depth > MAX_DEPTH:
            raise ScenarioError(
                f"line {_line(event)}: expected at most {MAX_DEPTH} levels of lists and maps, got more"
            )


def _check_size(root: yaml.Node) -> None:
    """Raise ScenarioError if there are too many values, or if a key is given twice."""
    sizes: dict[int, int] = {}
    inside: set[int] = set()

    def size(node: yaml.Node) -> int:
        if id(node) in inside:
            raise ScenarioError(f"line {_line(node)}: a value contains itself; remove the reference")
        if id(node) not in sizes:
            inside.add(id(node))
            sizes[id(node)] = 1 + sum(size(child) for child in _children(node))
            inside.discard(id(node))
            if sizes[id(node)] > MAX_VALUES:
                raise ScenarioError(f"line {_line(node)}: expected at most {MAX_VALUES} values, got more")
        return sizes[id(node)]

    size(root)


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        yield from node.value
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise ScenarioError(
                        f"line {_line(key)}: '{key.value}' is given twice; delete one of them"
                    )
                seen.add(key.value)
            yield key
            yield value


def _line(at: yaml.Node | yaml.Event) -> int:
    mark = at.start_mark
    return int(mark.line) + 1 if mark is not None else 0
