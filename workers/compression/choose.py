"""The choice of a method, by name and options. Imports no torch until a method is created."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.compression.types import Method


class MethodName(StrEnum):
    """`auto` is the smallest artefact within a measured loss (auto.py); the others are in methods/."""

    auto = "auto"
    deltacompress = "deltacompress"
    deltamix = "deltamix"
    magnitude = "magnitude"
    bitdelta = "bitdelta"
    low_rank = "low-rank"
    delta_come = "delta-come"
    sparse_gpt = "sparse-gpt"
    round_to_nearest = "round-to-nearest"


ALIASES: Mapping[str, MethodName] = {"sparse": MethodName.magnitude, "svd": MethodName.delta_come}
"""Earlier names of methods."""


@dataclass(frozen=True)
class Options:
    """A method and its numbers; None is the method's own default.

    `bits`: bits per stored value. `ratio`: the share of the layer's 16-bit size that its codes may take.
    `group_size`: columns that share a scale; None: one scale per row. `max_widths`: how many widths a layer
    may mix.
    """

    method: MethodName
    bits: int | None = None
    ratio: float | None = None
    group_size: int | None = None
    max_widths: int | None = None


class OptionError(ValueError):
    """An option that the method does not take, or an invalid value; `option` is its name."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


TAKES: Mapping[MethodName, frozenset[str]] = {
    MethodName.auto: frozenset(),
    MethodName.deltacompress: frozenset({"bits", "group_size"}),
    MethodName.deltamix: frozenset({"ratio", "max_widths"}),
    MethodName.magnitude: frozenset({"bits", "group_size"}),
    MethodName.bitdelta: frozenset(),
    MethodName.low_rank: frozenset({"ratio"}),
    MethodName.delta_come: frozenset({"ratio"}),
    MethodName.sparse_gpt: frozenset({"bits", "group_size"}),
    MethodName.round_to_nearest: frozenset({"bits", "group_size"}),
}

_CODED_BITS = (4, 2)  # the codes of the 2:4 format
_WHOLE_BITS = (8, 4, 3, 2)


def method_named(name: str) -> MethodName:
    """A method by its name or an alias. Raises OptionError."""
    if name in ALIASES:
        return ALIASES[name]
    try:
        return MethodName(name)
    except ValueError:
        raise OptionError("method", f"expected one of {', '.join(MethodName)}, got {name!r}") from None


def parse_ratio(text: str) -> float:
    """0.0625 for "1/16", "0.0625" or "6.25e-2". Raises OptionError."""
    try:
        ratio = float(Fraction(text.strip()))
    except (ValueError, ZeroDivisionError, OverflowError):
        raise OptionError("ratio", f"expected a share such as 1/16 or 0.0625, got {text!r}") from None
    _check_ratio(ratio)
    return ratio


def check(options: Options) -> None:
    """Raises OptionError for options that the method does not take, and for values out of range."""
    for option in _given(options):
        if option not in TAKES[options.method]:
            taken = ", ".join(sorted(TAKES[options.method])) or "no option"
            raise OptionError(
                option, f"the method {options.method} has no option {option}; its options are: {taken}"
            )
    if options.bits is not None:
        known = _WHOLE_BITS if options.method is MethodName.round_to_nearest else _CODED_BITS
        if options.bits not in known:
            raise OptionError("bits", f"expected {' or '.join(map(str, known))}, got {options.bits}")
    if options.ratio is not None:
        _check_ratio(options.ratio)
    if options.group_size is not None and (options.group_size < 8 or options.group_size % 8):
        raise OptionError("group_size", f"expected a multiple of 8, got {options.group_size}")
    if options.max_widths is not None and options.max_widths < 1:
        raise OptionError("max_widths", f"expected 1 or more, got {options.max_widths}")


def method_of(options: Options) -> Method:
    """The method, ready to compress layers. Raises OptionError; ValueError for auto, which is no method."""
    check(options)
    if options.method is MethodName.auto:
        raise ValueError("expected a single method, got auto, which tries several methods")
    return _factory(options.method)(**_given(options))


def _given(options: Options) -> dict[str, Any]:
    """The options that were set, without the method."""
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    return {name: value for name, value in values.items() if name != "method" and value is not None}


def _check_ratio(ratio: float) -> None:
    if not 0 < ratio <= 1:
        raise OptionError("ratio", f"expected a share above 0 and up to 1, got {ratio:g}")


def _factory(name: MethodName) -> Callable[..., Method]:
    """The method's constructor. Each module is imported at its first use."""
    from importlib import import_module

    stem = name.value.replace("-", "_")
    factory: Callable[..., Method] = getattr(import_module(f"workers.compression.methods.{stem}"), stem)
    return factory
