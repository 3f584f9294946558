"""Checks of the values of request fields, to be combined in a table. Pure.

A check takes a field's name and value, and raises InvalidRequest for an invalid value. Types are exact: vLLM
accepts "true", 1 and "2.0" as a boolean and numbers. A gateway that read such values differently would count
and charge something else than the engine does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from controlplane import errors

Check = Callable[[str, Any], None]

INT64 = 2**63
_SHOWN = 100  # characters of a value in a message


def unexpected(name: str, expected: str, value: Any) -> errors.InvalidRequest:
    return errors.InvalidRequest(f"{name}: expected {expected}; got {shown(value)}", param=name)


def shown(value: Any) -> str:
    """The beginning of a value; the whole text may be megabytes."""
    if isinstance(value, dict | list):
        kind = "an object" if isinstance(value, dict) else "a list"
        return f"{kind} of {len(value)}"
    if type(value) is int and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = value[: _SHOWN + 1] if isinstance(value, str) else value
    written = ascii(text)
    return written if len(written) <= _SHOWN else written[:_SHOWN] + "..."


def anything(name: str, value: Any) -> None:
    """No check: another part of the gateway checks the value."""


def boolean(name: str, value: Any) -> None:
    if type(value) is not bool:
        raise unexpected(name, "true or false", value)


def integer(least: int = -INT64, most: int = INT64 - 1) -> Check:
    def check(name: str, value: Any) -> None:
        if type(value) is not int or not least <= value <= most:
            raise unexpected(name, _within("an integer", least, most), value)

    return check


def number(least: float = -math.inf, most: float = math.inf) -> Check:
    """A finite number."""

    def check(name: str, value: Any) -> None:
        is_number = type(value) is float or (type(value) is int and -INT64 <= value < INT64)
        if not is_number or not math.isfinite(value) or not least <= value <= most:
            raise unexpected(name, _within("a finite number", least, most), value)

    return check


def text(most: int) -> Check:
    def check(name: str, value: Any) -> None:
        if type(value) is not str or len(value) > most:
            raise unexpected(name, f"a text of at most {most} characters", value)

    return check


def one_of(*values: str) -> Check:
    def check(name: str, value: Any) -> None:
        if type(value) is not str or value not in values:
            raise unexpected(name, f"one of {', '.join(values)}", value)

    return check


def exactly(value: Any, why: str) -> Check:
    """Only the value that has no effect."""

    def check(name: str, given: Any) -> None:
        if type(given) is not type(value) or given != value:
            raise unexpected(name, f"{value!r}, or no value ({why})", given)

    return check


def listed(each: Check, most: int | None = None) -> Check:
    def check(name: str, value: Any) -> None:
        if type(value) is not list or (most is not None and len(value) > most):
            raise unexpected(name, "a list" if most is None else f"a list of at most {most}", value)
        for item in value:
            each(name, item)

    return check


def either(check: Check, other: Check) -> Check:
    """A value that one of both checks accepts; the error comes from `other`."""

    def both(name: str, value: Any) -> None:
        try:
            check(name, value)
        except errors.InvalidRequest:
            other(name, value)

    return both


def mapping(of: Mapping[str, Check]) -> Check:
    """An object with only these fields; null counts as absent."""

    def check(name: str, value: Any) -> None:
        if type(value) is not dict:
            raise unexpected(name, "an object", value)
        for key, inner in value.items():
            if (known := of.get(key)) is None:
                raise errors.InvalidRequest(
                    f"{name}: expected fields among {', '.join(sorted(of))}; got {shown(key)}", param=name
                )
            if inner is not None:
                known(f"{name}.{key}", inner)

    return check


def keyed(each: Check, most: int | None = None) -> Check:
    """An object with any keys."""

    def check(name: str, value: Any) -> None:
        if type(value) is not dict or (most is not None and len(value) > most):
            raise unexpected(name, "an object" if most is None else f"an object of at most {most}", value)
        for inner in value.values():
            each(name, inner)

    return check


def scalar(longest: int) -> Check:
    def check(name: str, value: Any) -> None:
        if type(value) is str and len(value) <= longest:
            return
        if type(value) is bool or (type(value) is int and -INT64 <= value < INT64):
            return
        if type(value) is float and math.isfinite(value):
            return
        raise unexpected(name, f"a boolean, a number or a text of at most {longest} characters", value)

    return check


def refused(why: str) -> Check:
    def check(name: str, value: Any) -> None:
        raise errors.InvalidRequest(f"{name} is not allowed: {why}", param=name)

    return check


def among(names: Collection[str], value: Any) -> bool:
    return type(value) is str and value in names


def _within(what: str, least: float, most: float) -> str:
    if least <= -INT64 and most >= INT64 - 1:
        return f"{what} of 64 bits" if what == "an integer" else what
    if most >= INT64 - 1:
        return f"{what}, at least {least}"
    if least <= -INT64:
        return f"{what}, at most {most}"
    return f"{what} from {least} to {most}"
