"""Limits on the constants that jinja2 computes while it compiles a template, such as 'x' * 10**9."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from profiler.patches.target import Target

OPERATORS = Target("jinja2.nodes", "_binop_to_func", read={"3.1": "e24c2fd9eb3e"})


@contextmanager
def limited(limit: Callable[[Any], Any]) -> Iterator[None]:
    """Within the context, jinja2 computes constants in this process with `limit(operator)`."""

    def make(operators: Mapping[str, Any]) -> dict[str, Any]:
        return {name: limit(operator) for name, operator in operators.items()}

    put_back = OPERATORS.replace(make)
    try:
        yield
    finally:
        put_back()
