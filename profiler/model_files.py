"""The files of a checkpoint's folder that are read: registration checks them; engines get no other files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from profiler.files import is_file
from profiler.weight_files import weight_files

CONFIG = "config.json"
TEKKEN = "tekken.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
# What engines and transformers read before weights, except the config; a folder may lack any of them.
SMALL_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    TEKKEN,
    "chat_template.jinja",
    "chat_template.json",
)
TEMPLATES = "additional_chat_templates"  # a folder of named templates, as transformers writes them


def small_files(folder: Path) -> tuple[str, ...]:
    """The names of the config, the tokenizer's files and the like that are in `folder`."""
    found = (name for name in (CONFIG, *SMALL_FILES, *_templates(folder)) if is_file(folder / name))
    return tuple(name for name in found if name != TEKKEN or is_tekken(folder))


def is_tekken(folder: Path) -> bool:
    """Whether Mistral's own file is the only tokenizer in `folder`. It is not read if there is another one:
    transformers would use it instead of a fine-tune's tokenizer.json."""
    return is_file(folder / TEKKEN) and not any(is_file(folder / name) for name in TOKENIZERS)


def files_read(folder: Path) -> tuple[str, ...]:
    """The names, relative to `folder`, of every file that belongs to its model. Raises CheckpointError when
    the weights cannot be found."""
    return (*small_files(folder), *weight_files(folder))


def _templates(folder: Path) -> Iterator[str]:
    try:
        found = sorted((folder / TEMPLATES).glob("*.jinja"))
    except OSError:
        return
    yield from (f"{TEMPLATES}/{path.name}" for path in found)
