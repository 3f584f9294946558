"""The files of a checkpoint's folder that are read: registration checks them; engines get no other files."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

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
    return small_names(
        {name for name in (CONFIG, *SMALL_FILES, *_templates(folder)) if is_file(folder / name)}
    )


def small_names(names: Collection[str]) -> tuple[str, ...]:
    """The names of the config, the tokenizer's files and the like, of these names in a folder."""
    templates = sorted(name for name in names if _is_template(PurePosixPath(name)))
    found = (name for name in (CONFIG, *SMALL_FILES, *templates) if name in names)
    return tuple(name for name in found if name != TEKKEN or _only_tekken(names))


def is_tekken(folder: Path) -> bool:
    """Whether Mistral's own file is the only tokenizer in `folder`. It is not read if there is another one:
    transformers would use it instead of a fine-tune's tokenizer.json."""
    return is_file(folder / TEKKEN) and _only_tekken({name for name in TOKENIZERS if is_file(folder / name)})


def _only_tekken(names: Collection[str]) -> bool:
    return not any(name in names for name in TOKENIZERS)


def _is_template(path: PurePosixPath) -> bool:
    return str(path.parent) == TEMPLATES and path.suffix == ".jinja"


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
