"""Corrections of type names in a config.json that current transformers cannot read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DTYPE_KEYS = ("dtype", "torch_dtype")  # transformers before 5 used the latter


def dtype_name(raw: Mapping[str, Any]) -> Any:
    """The declared type of the weights; None if it is missing or "auto" (the type in which they are
    stored)."""
    name = next((raw[key] for key in DTYPE_KEYS if key in raw), None)
    if isinstance(name, str):
        name = name.removeprefix("torch.")
    return None if name == "auto" else name


def corrected(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` with a weight type that transformers knows, or with none. Equal to `raw` if nothing was wrong."""
    changed = dict(raw)
    for key in DTYPE_KEYS:
        value = raw.get(key)
        if value == "auto":
            del changed[key]
        elif isinstance(value, str):
            changed[key] = value.removeprefix("torch.")
    return changed
