"""A variant's files other than weights: tokenizer, chat template, end tokens and generation defaults.

Engines use these files for a variant's requests, and its base's where a file is missing. Registration reads
them here, reports which are the variant's own, and refuses what cannot be served.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from profiler.errors import AdapterError, CheckpointError
from profiler.files import MAX_CONFIG_BYTES, is_file, read_json, shown
from profiler.inside import open_file
from profiler.tokenizer_file import FILE, TokenizerFile, named, read_tokenizer

CONFIG = "config.json"
GENERATION = "generation_config.json"
SETTINGS = "tokenizer_config.json"
TEMPLATE, OLD_TEMPLATE = "chat_template.jinja", "chat_template.json"
ADDED_ROWS_FILE = "added-rows.safetensors"
TEMPLATES = (TEMPLATE, OLD_TEMPLATE)
TOKENIZER = (FILE, SETTINGS, "special_tokens_map.json", "added_tokens.json")
VOCABULARIES = ("tokenizer.model", "vocab.json", "merges.txt")
SIDE_FILES = (GENERATION, *TEMPLATES, *TOKENIZER, *VOCABULARIES)
MAX_TEMPLATE_BYTES = 1 << 18  # long templates have 30 KB; a server parses them
MAX_FILE_BYTES = 64_000_000  # the largest tokenizers have about 35 MB
END = "eos_token_id"
# Keys of generation_config.json that an engine uses for requests that do not set them.
DEFAULTS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "max_new_tokens"),
)
DECODERS = ("decoder", "generator", "text_config")  # parts of a config.json that may have these keys


class Generation(NamedTuple):
    """End tokens and generation defaults, and the name of the file that has them."""

    settings: Mapping[str, Any]
    file: str


def generation_of(folder: Path) -> Generation:
    """The settings in generation_config.json, or without this file those in config.json, as transformers
    (`GenerationConfig.from_model_config`) and vLLM read them. Raises CheckpointError."""
    if is_file(folder / GENERATION):
        return Generation(_read(folder / GENERATION), GENERATION)
    return Generation(_in_config(folder), CONFIG)


def own_generation(folder: Path, base: Path, roots: tuple[Path, ...] = ()) -> Generation:
    """The settings of the variant in `folder` that differ from its base's.

    A config.json only counts without a generation_config.json, and where it differs from the base's
    config.json: trainers copy that one. `roots`: as in `write_together`. Raises CheckpointError.
    """
    before = generation_of(base)
    if is_file(folder / GENERATION):
        ours, file = _read(folder / GENERATION), GENERATION
    else:
        ours, file = _in_config(folder, roots), CONFIG
        ours = _different(ours, folder / CONFIG, _in_config(base), base / CONFIG)
    return Generation(_different(ours, folder / file, before.settings, base / before.file), file)


def generation_file(folder: Path, base: Path, roots: tuple[Path, ...] = ()) -> dict[str, Any] | None:
    """The generation_config.json of a variant that has settings of its own in its config.json: they replace
    its base's. None: it has its own file, or needs none. `roots`: as in `write_together`. Raises
    CheckpointError."""
    own = own_generation(folder, base, roots)
    return {**generation_of(base).settings, **own.settings} if own.file == CONFIG and own.settings else None


def _in_config(folder: Path, roots: tuple[Path, ...] = ()) -> dict[str, Any]:
    config = _read(folder / CONFIG, roots)
    part: dict[str, Any] = next((config[name] for name in DECODERS if isinstance(config.get(name), dict)), {})
    places = [{name: place.get(name) for name in (END, *DEFAULTS)} for place in (part, config)]
    return {name: value for place in places for name, value in place.items() if value is not None}


def _different(
    ours: Mapping[str, Any], file: Path, theirs: Mapping[str, Any], their_file: Path
) -> dict[str, Any]:
    """Our settings with other values than theirs; one end token is the same as a list of it."""
    own = {n: ours[n] for n in DEFAULTS if ours.get(n) is not None and ours[n] != theirs.get(n)}
    if (ends := _ids(ours.get(END), file)) and ends != _ids(theirs.get(END), their_file):
        own[END] = ours[END]
    return own


def side_files(folder: Path) -> tuple[str, ...]:
    """The names of the side files that are in `folder`."""
    return tuple(name for name in SIDE_FILES if is_file(folder / name))


def own_words(folder: Path, base: Path, rows: int) -> tuple[str, ...]:
    """Descriptions, each with its file, of the variant's own settings in `folder`, without weights.

    `rows` are the rows of its base's vocabulary. Raises CheckpointError when a file cannot be read,
    AdapterError for tokens without a row.
    """
    return tuple(_own_words(folder, base, rows))


def write_together(base: Path, variant: Path, target: Path, roots: tuple[Path, ...] = ()) -> None:
    """Write a variant's side files to `target`, and its base's files that it lacks. Raises CheckpointError.

    A variant's tokenizer replaces all tokenizer files of its base, and its template all templates. The
    variant's files must lie below `roots`; empty: below any folder that this process may read.
    """
    ours = side_files(variant)
    replaced = {*ours, *(TEMPLATES if chat_template(variant).text is not None else ())}
    if FILE in ours:
        replaced |= {*TOKENIZER, *VOCABULARIES} - {SETTINGS}
    target.mkdir(parents=True, exist_ok=True)
    for name in SIDE_FILES:
        (target / name).unlink(missing_ok=True)
        if name in ours:
            _copy(variant / name, target / name, _most_bytes(name, base), roots)
        elif name not in replaced and is_file(base / name):
            _copy(base / name, target / name, MAX_FILE_BYTES)
    if (generation := generation_file(variant, base, roots)) is not None:
        (target / GENERATION).write_text(json.dumps(generation), encoding="utf-8")
    template, file = chat_template(base)
    if template is not None and file == SETTINGS and chat_template(target).text is None:
        (target / TEMPLATE).write_text(template, encoding="utf-8")


def _most_bytes(name: str, base: Path) -> int:
    """The size limit of a file. A variant's tokenizer is little larger than its base's, because engines hold
    many."""
    if name != FILE or not is_file(base / FILE):
        return MAX_FILE_BYTES
    return min(MAX_FILE_BYTES, 2 * (base / FILE).stat().st_size + MAX_CONFIG_BYTES)


def _copy(source: Path, target: Path, most_bytes: int, roots: tuple[Path, ...] = ()) -> None:
    """Copy a plain file that may be read from here. Raises CheckpointError."""
    try:
        with open_file(source, roots) as file:
            raw = file.read(most_bytes + 1) or b""
        if len(raw) > most_bytes:
            raise CheckpointError(
                f"{source} has more than the allowed {most_bytes} bytes; copy the model's own file there"
            )
        target.write_bytes(raw)
    except OSError as error:
        raise CheckpointError(f"cannot copy {source}: {error.strerror}; check its permissions") from error


def own_template(folder: Path, base: Path) -> str:
    """The chat template of the variant in `folder` if its base has not the same; else "". Raises
    CheckpointError."""
    text = chat_template(folder).text
    return text if text is not None and text != chat_template(base).text else ""


def _own_words(folder: Path, base: Path, rows: int) -> Iterator[str]:
    text, file = chat_template(folder)
    if text is not None and text != chat_template(base).text:
        yield f"chat template ({file})"
    if new := _new_tokens(folder, base, rows):
        refused = ", without rows: requests with these are refused" if max(new.values()) >= rows else ""
        yield f"tokens {named(new)} ({FILE}{refused})"
    ours, theirs = (_read(where / SETTINGS) for where in (folder, base))
    if (end := _token(ours.get("eos_token"))) is not None and end != _token(theirs.get("eos_token")):
        yield f"end {end!r:.60} ({SETTINGS})"
    own, file = own_generation(folder, base)
    if ends := _ids(own.get(END), folder / file):
        yield f"ends {', '.join(map(str, ends))} ({file})"
    for name in DEFAULTS:
        if name in own:
            yield f"{name} {shown(own[name], 20)} ({file})"


class ChatTemplate(NamedTuple):
    """The text of a chat template (None: the model has none), and the file that has it."""

    text: str | None
    file: str


def chat_template(folder: Path) -> ChatTemplate:
    """The chat template that transformers uses. Raises CheckpointError."""
    where = folder / TEMPLATE
    if is_file(where):
        return ChatTemplate(_text(where), TEMPLATE)
    if is_file(folder / OLD_TEMPLATE):
        return ChatTemplate(_default(_read(folder / OLD_TEMPLATE), folder / OLD_TEMPLATE), OLD_TEMPLATE)
    return ChatTemplate(_default(_read(folder / SETTINGS), folder / SETTINGS), SETTINGS)


def _text(where: Path) -> str:
    try:
        with open_file(where) as file:
            raw = file.read(MAX_TEMPLATE_BYTES + 1) or b""
        return _bounded(raw.decode(), where)
    except OSError as error:
        raise CheckpointError(f"cannot read {where}: {error.strerror}; check its permissions") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where} is not UTF-8 text ({error}); save the template as UTF-8") from error


def _bounded(template: str, where: Path) -> str:
    if len(template) > MAX_TEMPLATE_BYTES:
        raise CheckpointError(
            f"the chat template in {where} has more than the allowed {MAX_TEMPLATE_BYTES} characters; copy "
            "the right file"
        )
    return template


def _default(settings: Mapping[str, Any], where: Path) -> str | None:
    """The template; of several named templates the default one."""
    value = settings.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return _bounded(value, where) if isinstance(value, str) else None


def _new_tokens(folder: Path, base: Path, rows: int) -> dict[str, int]:
    """The tokens of the variant's tokenizer that its base's does not have with the same id."""
    ours, theirs = read_tokenizer(folder), read_tokenizer(base)
    if ours is None or theirs is None:
        return {}
    new = {text: number for text, number in ours.added.items() if theirs.tokens.get(text) != number}
    _refuse_rowless(ours, theirs, rows, _token(_read(folder / SETTINGS).get("pad_token")), folder)
    return new


def _refuse_rowless(
    ours: TokenizerFile, theirs: TokenizerFile, rows: int, pad: str | None, folder: Path
) -> None:
    """Refuse tokens without a row, except the padding token, which no prompt contains, and tokens that the
    base's tokenizer also has."""
    without = {t: n for t, n in ours.beyond(rows).items() if t != pad and theirs.tokens.get(t) != n}
    if without and not is_file(folder / ADDED_ROWS_FILE):  # a delta keeps such rows for merging
        raise AdapterError(
            f"{folder / FILE} has {named(without)}, but the base's vocabulary has only {rows} rows, so "
            "requests cannot use these tokens; train on a base that was saved with resized embeddings. If "
            f"the adapter was not trained with these tokens, move the tokenizer's files out of {folder} "
            "instead"
        )


def _read(where: Path, roots: tuple[Path, ...] = ()) -> dict[str, Any]:
    return read_json(where, MAX_CONFIG_BYTES, roots) if is_file(where) else {}


def _token(value: Any) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _ids(value: Any, where: Path) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(each) is int for each in ids):
        raise CheckpointError(
            f"{where}: expected eos_token_id to be a token id or a list of them, got {shown(value)}"
        )
    return tuple(sorted(ids))
