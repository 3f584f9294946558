"""Task files: what they may hold, and what is said of those that hold something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from profiler.errors import TaskError
from profiler.evaluation.normalising import Normalise, normalised
from profiler.evaluation.tasks import parse_task, read_tasks
from profiler.evaluation.types import Form, Likelihood, Multiple, Question, Settings, TaskKind, Text

ADD = {"prompt": "2 + 2 =", "answer": "4"}
PICK = {"prompt": "The sky is", "choices": [" blue", " square"], "answer": 0}
READ = {"text": "Once upon a time."}


def lines(*rows: Any) -> str:
    return "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)


def test_each_kind_of_item_is_known_by_its_fields() -> None:
    assert parse_task(lines(ADD), "sums", "sums.jsonl").items == (Question("2 + 2 =", ("4",)),)
    assert parse_task(lines(PICK), "sky", "sky.jsonl").items == (
        Multiple("The sky is", (" blue", " square"), 0),
    )
    read = parse_task(lines("", READ, ""), "tales", "tales.jsonl")
    assert (read.name, read.kind, read.items) == ("tales", TaskKind.PERPLEXITY, (Text("Once upon a time."),))
    assert read.settings == Settings()


def test_a_header_names_the_task_and_sets_how_it_is_asked() -> None:
    header = {"task": "kinship", "maxTokens": 8, "stop": ["\n"], "normalise": "last_word", "format": "chat"}
    task = parse_task(lines(header, {"prompt": "Who?", "answer": ["aunt", "an aunt"]}), "file", "file.jsonl")
    assert task.name == "kinship"
    assert task.settings == Settings(8, ("\n",), Normalise.LAST_WORD, Form.CHAT)
    assert task.items == (Question("Who?", ("aunt", "an aunt")),)
    scored = parse_task(lines({"task": "sky", "likelihood": "per_byte"}, PICK), "file", "file.jsonl")
    assert scored.settings.likelihood is Likelihood.PER_BYTE


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no items"),
        (lines({"task": "a"}), "has no items"),
        (lines(ADD, "{"), "line 2: expected a JSON object, got invalid JSON"),
        (lines(ADD, "[1]"), "line 2: expected a JSON object, got a list"),
        (lines(ADD, "", READ), "line 3 is an item of perplexity, but line 1 is an item of exact_match"),
        (lines({"prompt": "a"}), "line 1: expected the fields prompt and answer"),
        (lines({**ADD, "more": 1}), "got 'prompt', 'answer', 'more'"),
        (lines({**ADD, "prompt": ""}), "expected `prompt` to be a text that is not empty"),
        (lines({**ADD, "answer": 4}), "expected `answer` to be a list of texts"),
        (lines({**PICK, "answer": 2}), "index of the right choice, 0 to 1, got 2"),
        (lines({**PICK, "answer": True}), "0 to 1, got True"),
        (lines({**PICK, "choices": ["one"]}), "at least two choices, got 1"),
        (lines({**PICK, "choices": ["one", ""]}), "list of texts that are not empty"),
        (lines({"task": "a", "tokens": 3}, ADD), "line 1: unknown setting 'tokens'"),
        (
            lines({"task": "a", "maxTokens": 0}, ADD),
            "expected `maxTokens` to be a whole number of at least 1",
        ),
        (lines({"task": "a", "normalise": "upper"}, ADD), "expected `normalise` to be one of none, space"),
        (lines({"task": "a\n"}, ADD), "printable characters"),
        (lines({"task": "a", "format": "chat"}, READ), "needs items with prompts"),
        (lines(ADD, {"task": "late"}), "line 2: expected the fields"),
    ],
)
def test_an_error_names_the_file_and_the_line(text: str, said: str) -> None:
    with pytest.raises(TaskError) as raised:
        parse_task(text, "file", "folder/file.jsonl")
    assert str(raised.value).startswith("folder/file.jsonl")
    assert said in str(raised.value)


def test_a_folder_holds_a_task_in_each_file(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(lines(PICK))
    (tmp_path / "a.jsonl").write_text(lines(ADD))
    (tmp_path / "notes.txt").write_text("not a task")
    assert [task.name for task in read_tasks(tmp_path)] == ["a", "b"]
    (tmp_path / "c.jsonl").write_text(lines({"task": "a"}, ADD))
    with pytest.raises(
        TaskError, match=r"c\.jsonl: its task has the same name, 'a', as the task in a\.jsonl"
    ):
        read_tasks(tmp_path)


def test_a_missing_or_binary_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="expected a file of tasks"):
        read_tasks(tmp_path / "none.jsonl")
    with pytest.raises(TaskError, match="with such files, found none"):
        read_tasks(tmp_path)
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}')
    with pytest.raises(TaskError, match="UTF-8"):
        read_tasks(tmp_path / "latin.jsonl")


def test_a_digest_tells_contents_and_settings_apart() -> None:
    plain = parse_task(lines(ADD, ADD), "one", "a")
    assert plain.digest == parse_task(lines(ADD, "", ADD), "another", "b").digest
    others = [
        parse_task(lines(ADD), "one", "a"),
        parse_task(lines({"task": "one", "maxTokens": 3}, ADD, ADD), "one", "a"),
        plain.first(1),
    ]
    assert len({plain.digest, *(task.digest for task in others)}) == 4
    assert plain.first(2) == plain.first(None) == plain
    assert len(plain.first(1).items) == 1


@pytest.mark.parametrize(
    ("how", "text", "expected"),
    [
        (Normalise.NONE, " a\n", " a\n"),
        (Normalise.SPACE, "\n two   words \n", "two words"),
        (Normalise.WORDS, "Don't: STOP, mother-in-law!", "don't stop mother-in-law"),
        (Normalise.FIRST_LINE, "\n  first \n second", "first"),
        (Normalise.LAST_WORD, "Anna is his Mother.", "mother"),
        (Normalise.LAST_WORD, "42!", "42"),
        (Normalise.LAST_WORD, "...", ""),
        (Normalise.LAST_NUMBER, "The sum is 1,024.50.", "1024.5"),
        (Normalise.LAST_NUMBER, "7-3", "3"),
        (Normalise.LAST_NUMBER, "it is -03", "-3"),
        (Normalise.LAST_NUMBER, "1,2,3", "3"),
        (Normalise.LAST_NUMBER, "-0.0", "0"),
        (Normalise.LAST_NUMBER, "9" * 5000, "9" * 5000),
        (Normalise.LAST_NUMBER, "none", ""),
    ],
)
def test_the_counted_part_of_an_answer_is_extracted(how: Normalise, text: str, expected: str) -> None:
    assert normalised(text, how) == expected
