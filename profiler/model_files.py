"""Which files of a checkpoint's folder are read: registration checks these, engines are given no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from profiler.files import is_file
from profiler.weight_files import weight_files

CONFIG = "config.json"
# Beside the config, what engines and transformers read before weights; a folder may lack any of them.
SMALL_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
)
TEMPLATES = "additional_chat_templates"  # a folder of named templates, as transformers writes them


def small_files(folder: Path) -> tuple[str, ...]:
    """The names of the config, the tokenizer's files and the like that are in `folder`."""
    return tuple(name for name in (CONFIG, *SMALL_FILES, *_templates(folder)) if is_file(folder / name))


def files_read(folder: Path) -> tuple[str, ...]:
    """The names, below `folder`, of every file that belongs to its model. Raises CheckpointError when the
    weights cannot be found."""
    return (*small_files(folder), *weight_files(folder))


def _templates(folder: Path) -> Iterator[str]:
    try:
        found = sorted((folder / TEMPLATES).glob("*.jinja"))
    except OSError:
        return
    yield from (f"{TEMPLATES}/{path.name}" for path in found)
