"""What a config.json may say of its type in a way that today's transformers cannot read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DTYPE_KEYS = ("dtype", "torch_dtype")  # the latter of transformers before 5


def dtype_name(raw: Mapping[str, Any]) -> Any:
    """The declared type of the weights; None if none is, or if it says "auto": as they are stored."""
    name = next((raw[key] for key in DTYPE_KEYS if key in raw), None)
    if isinstance(name, str):
        name = name.removeprefix("torch.")
    return None if name == "auto" else name


def corrected(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`raw`, with a type of weights that transformers knows, or none. Equal to it where nothing was wrong."""
    changed = dict(raw)
    for key in DTYPE_KEYS:
        value = raw.get(key)
        if value == "auto":
            del changed[key]
        elif isinstance(value, str):
            changed[key] = value.removeprefix("torch.")
    return changed
