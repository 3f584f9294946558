"""Tasks and their files: JSON lines, one item per line. docs/evaluation.md shows the format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from profiler.errors import TaskError
from profiler.evaluation.normalising import Normalise
from profiler.evaluation.types import Form, Item, Likelihood, Multiple, Question, Settings, TaskKind, Text

SUFFIX = ".jsonl"
HEADER = "task"
MAX_NAME = 128

_FIELDS: dict[TaskKind, tuple[frozenset[str], frozenset[str]]] = {
    # fields that an item must have, and fields that it may have
    TaskKind.EXACT_MATCH: (frozenset({"prompt", "answer"}), frozenset()),
    TaskKind.MULTIPLE_CHOICE: (frozenset({"prompt", "choices", "answer"}), frozenset()),
    TaskKind.PERPLEXITY: (frozenset({"text"}), frozenset()),
}
_SETTINGS = frozenset({HEADER, "maxTokens", "stop", "normalise", "format", "likelihood"})


@dataclass(frozen=True)
class Task:
    """Items of one kind under a name. `digest` identifies this content, settings included."""

    name: str
    kind: TaskKind
    items: tuple[Item, ...]
    settings: Settings = field(default_factory=Settings)
    digest: str = ""

    def first(self, count: int | None) -> Task:
        """A task of the first `count` items, with its own digest; the task itself if it has at most
        `count`."""
        if count is None or count >= len(self.items):
            return self
        return replace(self, items=self.items[:count], digest=f"{self.digest}:{count}")


def read_tasks(path: Path) -> tuple[Task, ...]:
    """The task of a file, or the tasks of all `.jsonl` files of a folder, by file name.

    Errors: TaskError, which names the file and the line.
    """
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not files:
        raise TaskError(f"{path}: expected a {SUFFIX} file or a folder with such files, found none")
    tasks = tuple(read_task(file) for file in files)
    files_of: dict[str, Path] = {}
    for task, file in zip(tasks, files, strict=True):
        if task.name in files_of:
            raise TaskError(
                f"{file}: its task has the same name, '{task.name}', as the task in "
                f"{files_of[task.name].name}; give each task its own name"
            )
        files_of[task.name] = file
    return tasks


def read_task(file: Path) -> Task:
    """The task of one file. Errors: TaskError."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise TaskError(
            f"expected a file of tasks (JSON lines) at {file}, found none; check the path"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{file} cannot be read ({error}); expected tasks as JSON lines in UTF-8") from error
    return parse_task(text, file.stem, str(file))


def parse_task(text: str, name: str, source: str) -> Task:
    """Parse a task; its name is `name` unless its lines name it. `source` is the file's name in errors.

    Errors: TaskError.
    """
    rows = list(_rows(text, source))
    settings, header = Settings(), ""
    if rows and HEADER in rows[0][1]:
        header = f"{source}, line {rows[0][0]}"
        name, settings = _header(rows[0][1], header)
        rows = rows[1:]
    if not (0 < len(name) <= MAX_NAME and name.isprintable()):
        raise TaskError(f"{source}: expected a name of 1 to {MAX_NAME} printable characters, got {name!r}")
    if not rows:
        raise TaskError(f"{source} has no items; write one JSON object per line")
    kinds = [_kind(row, f"{source}, line {number}") for number, row in rows]
    _check_same(kinds, [number for number, _ in rows], source)
    kind = kinds[0]
    if settings.format is Form.CHAT and kind is TaskKind.PERPLEXITY:
        raise TaskError(
            f'{header}: `"format": "chat"` needs items with prompts, but these items are texts; leave format '
            "out"
        )
    items = tuple(_item(kind, row, f"{source}, line {number}") for number, row in rows)
    return Task(name, kind, items, settings, digest_of(items, settings))


def digest_of(items: Sequence[Item], settings: Settings) -> str:
    """The task's digest: 16 hexadecimal digits."""
    return hashlib.sha256(repr((tuple(items), settings)).encode()).hexdigest()[:16]


def _rows(text: str, source: str) -> list[tuple[int, dict[str, Any]]]:
    """The objects by line number, without empty lines."""
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TaskError(
                f"{source}, line {number}: expected a JSON object, got invalid JSON ({error})"
            ) from error
        if not isinstance(row, dict):
            raise TaskError(
                f"{source}, line {number}: expected a JSON object, got a {type(row).__name__}: {line:.80}"
            )
        rows.append((number, row))
    return rows


def _header(row: Mapping[str, Any], where: str) -> tuple[str, Settings]:
    unknown = sorted(row.keys() - _SETTINGS)
    if unknown:
        raise TaskError(
            f"{where}: unknown setting {unknown[0]!r}; expected settings among {', '.join(sorted(_SETTINGS))}"
        )
    name = _text(row, HEADER, where)
    standard = Settings()
    return name, Settings(
        max_tokens=_count(row, "maxTokens", standard.max_tokens, where),
        stop=_texts(row, "stop", where) if "stop" in row else standard.stop,
        normalise=_one_of(Normalise, row, "normalise", standard.normalise, where),
        format=_one_of(Form, row, "format", standard.format, where),
        likelihood=_one_of(Likelihood, row, "likelihood", standard.likelihood, where),
    )


def _kind(row: Mapping[str, Any], where: str) -> TaskKind:
    """The kind of an item, by its fields."""
    for kind, (required, allowed) in _FIELDS.items():
        if required <= row.keys() <= required | allowed:
            return kind
    raise TaskError(
        f"{where}: expected the fields prompt and answer (exact match), prompt, choices and answer (multiple "
        f"choice), or text (perplexity), got {', '.join(map(repr, row)) or 'none'}"
    )


def _check_same(kinds: Sequence[TaskKind], numbers: Sequence[int], source: str) -> None:
    for kind, number in zip(kinds, numbers, strict=True):
        if kind is not kinds[0]:
            raise TaskError(
                f"{source}: line {number} is an item of {kind}, but line {numbers[0]} is an item of "
                f"{kinds[0]}; put items of each kind into a separate file"
            )


def _item(kind: TaskKind, row: Mapping[str, Any], where: str) -> Item:
    match kind:
        case TaskKind.EXACT_MATCH:
            answer = row["answer"]
            answers = (answer,) if isinstance(answer, str) else _texts(row, "answer", where)
            return Question(_text(row, "prompt", where), answers)
        case TaskKind.MULTIPLE_CHOICE:
            return _multiple(row, where)
        case TaskKind.PERPLEXITY:
            return Text(_text(row, "text", where))


def _multiple(row: Mapping[str, Any], where: str) -> Multiple:
    choices = _texts(row, "choices", where)
    if len(choices) < 2:
        raise TaskError(f"{where}: expected at least two choices, got {len(choices)}")
    answer = row["answer"]
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise TaskError(
            f"{where}: expected `answer` to be the index of the right choice, 0 to {len(choices) - 1}, got "
            f"{answer!r:.80}"
        )
    return Multiple(_text(row, "prompt", where), choices, answer)


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    value = row[name]
    if not isinstance(value, str) or not value:
        raise TaskError(f"{where}: expected `{name}` to be a text that is not empty, got {value!r:.80}")
    return value


def _texts(row: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    value = row[name]
    if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
        raise TaskError(
            f"{where}: expected `{name}` to be a list of texts that are not empty, got {value!r:.80}"
        )
    return tuple(value)


def _count(row: Mapping[str, Any], name: str, standard: int, where: str) -> int:
    value = row.get(name, standard)
    if type(value) is not int or value < 1:
        raise TaskError(f"{where}: expected `{name}` to be a whole number of at least 1, got {value!r:.80}")
    return value


def _one_of(kinds: Any, row: Mapping[str, Any], name: str, standard: Any, where: str) -> Any:
    value = row.get(name, standard)
    try:
        return kinds(value)
    except ValueError as error:
        raise TaskError(
            f"{where}: expected `{name}` to be one of {', '.join(kinds)}, got {value!r:.80}"
        ) from error
