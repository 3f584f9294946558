"""What PEFT's folders have in common: their two files, their names for modules, what we refuse.

Nothing in a folder is executed: `.bin` files (pickle) are refused, and patterns given as regular
expressions are compiled but never run, because a hostile one could take for ever. The tensors
themselves say which modules are adapted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from profiler.errors import AdapterError, CheckpointError
from profiler.files import is_file, shown
from profiler.types import ModelSpec, TensorRef
from profiler.variants.modules import module_names
from profiler.variants.types import FileRef
from profiler.weight_files import locate_in

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
MAX_PATTERN = 2_000  # characters of a regular expression: compiling one takes time


def endings(module_name: str) -> set[str]:
    """Every target by which PEFT can mean this module: its whole name and its last parts."""
    parts = module_name.split(".")
    return {".".join(parts[start:]) for start in range(len(parts))}


def all_endings(names: Iterable[str]) -> set[str]:
    return set().union(*map(endings, names))


def read_weights(folder: Path) -> tuple[dict[str, TensorRef], FileRef]:
    """The tensors of the folder, by PEFT's name, and their file. Raises CheckpointError."""
    if not is_file(folder / WEIGHTS) and is_file(folder / "adapter_model.bin"):
        raise CheckpointError(
            f"{folder} holds adapter_model.bin, which is pickle and can run code when read; "
            f"save it again with save_pretrained(safe_serialization=True) to get {WEIGHTS}"
        )
    tensors = locate_in(folder, WEIGHTS)
    return tensors, FileRef(
        WEIGHTS, max((ref.offset + ref.size_bytes for ref in tensors.values()), default=0)
    )


def require_type(raw: Mapping[str, Any], expected: str) -> None:
    """Raises AdapterError."""
    if raw.get("peft_type") != expected:
        raise AdapterError(f"{CONFIG}: expected peft_type {expected}, got {shown(raw.get('peft_type'))}")


def refuse_options(raw: Mapping[str, Any], refused: Mapping[str, str]) -> None:
    """Raises AdapterError for any option in `refused` (key: what it means) that is on."""
    for key, meaning in refused.items():
        if raw.get(key):
            raise AdapterError(
                f"{CONFIG}: {meaning} is not supported; train without it, or merge it into a base of its own"
            )


def parse_targets(value: Any, base: ModelSpec) -> frozenset[str] | None:
    """Listed targets, each checked to exist in the base; None for "all-linear" and regexes.

    Raises AdapterError.
    """
    if isinstance(value, str) and value:
        if value != "all-linear":
            _check_regex(value)
        return None
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise AdapterError(f"{CONFIG}: expected target_modules to be a list of names or a pattern")
    known = all_endings(module_names(base))
    lacking = [target for target in value if target not in known]
    if lacking:
        raise AdapterError(
            f"{CONFIG}: the base ({base.architecture}) has no adaptable module {', '.join(lacking)[:200]}; "
            f"it has {', '.join(base.linear_shapes)}"
        )
    return frozenset(value)


def _check_regex(pattern: str) -> None:
    try:
        if len(pattern) > MAX_PATTERN:
            raise ValueError(f"longer than {MAX_PATTERN} characters")
        re.compile(pattern)
    except (ValueError, re.error, RecursionError, OverflowError) as error:
        raise AdapterError(f"{CONFIG}: target_modules is not a valid regular expression ({error})") from error


def check_targets(targets: frozenset[str] | None, adapted: Iterable[str]) -> None:
    """Listed targets and adapted modules must agree. Raises AdapterError or CheckpointError."""
    if targets is None:
        return
    adapted = list(adapted)
    for name in adapted:
        if not targets & endings(name):
            raise AdapterError(f"{WEIGHTS}: {name} has weights but target_modules does not name it")
    unused = sorted(targets - all_endings(adapted))
    if unused:
        raise CheckpointError(
            f"{WEIGHTS}: target_modules names {', '.join(unused)[:200]}, but no tensor adapts it; "
            "copy the file again"
        )
