"""Calibration texts from files: what becomes a row, and what is said of files that are of no use."""

from __future__ import annotations

import hashlib
import json
import resource
import signal
import struct
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from profiler.errors import CheckpointError
from testkit.tiny_families import TINY
from workers import limited
from workers.compression.calibration.text_files import read_documents
from workers.compression.calibration.texts import Texts, bundled_texts, read_texts

WORDS = {**{f"w{n}": n for n in range(40)}, "user": 40, "assistant": 41, "[UNK]": 42}
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


def folder_of(path: Path, template: str | None = None) -> Path:
    """A config of 16 hidden and 24 inner features and 64 positions, and a tokenizer of whole words."""
    TINY[0].make_config().save_pretrained(path)
    words = Tokenizer(WordLevel(WORDS, unk_token="[UNK]"))
    words.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    made.chat_template = template
    made.save_pretrained(path)
    return path


def ids_of(texts: Texts) -> list[list[int]]:
    return [row.tolist() for row in texts.rows]


def jsonl(path: Path, *values: object) -> Path:
    path.write_text("\n".join(json.dumps(value) for value in values) + "\n")
    return path


def test_lines_are_rows_of_their_own_in_each_of_three_forms(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", TEMPLATE)
    messages = [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": "w7"}]
    file = jsonl(
        tmp_path / "a.jsonl", {"text": "w3 w4"}, {"prompt": "w8 ", "answer": "w9"}, {"messages": messages}
    )
    assert ids_of(read_texts(file, folder)) == [[3, 4], [8, 9], [40, 5, 6, 41, 7]]


def test_long_lines_give_several_rows_when_there_are_few(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    file = jsonl(tmp_path / "a.jsonl", {"text": "w1 w2 w3 w4 w5"}, {"text": "w6"})
    assert ids_of(read_texts(file, folder, tokens=2)) == [[1, 2], [3, 4], [5], [6]]
    assert ids_of(read_texts(file, folder, rows=2, tokens=2)) == [[1, 2], [6]]


def test_rows_come_from_all_over_a_file(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    file = jsonl(tmp_path / "a.jsonl", *({"text": f"w{n}"} for n in range(40)))
    assert ids_of(read_texts(file, folder, rows=4)) == [[0], [10], [20], [30]]


def test_paragraphs_follow_each_other_in_a_row(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    file = tmp_path / "a.txt"
    file.write_text("w1 w2\r\n\r\nw3\n\n\n \nw4 w5\nw6\n")
    assert ids_of(read_texts(file, folder)) == [[1, 2, 3, 4, 5, 6]]


def test_rows_are_no_longer_than_the_model_has_positions(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    file = tmp_path / "a.txt"
    file.write_text("w7 " * 1000)
    texts = read_texts(file, folder)
    assert max(len(row) for row in texts.rows) == 64
    assert texts.tokens == 1000


def test_no_character_of_a_text_is_lost(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("abc def\n\n" * 50 + "x" * 500)
    found = "".join(document.text for document in read_documents(file, 64))
    assert sorted(found.replace("\n", "")) == sorted(file.read_text().replace("\n", ""))


def test_few_tokens_are_warned_of_with_figures(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    file = jsonl(tmp_path / "a.jsonl", {"text": "w1 " * 23})
    (warning,) = read_texts(file, folder, rows=3, tokens=50).warnings
    for figure in ("23 tokens in 1 rows", "the 24 inputs", "better 150"):
        assert figure in warning
    assert read_texts(jsonl(tmp_path / "b.jsonl", {"text": "w1 " * 24}), folder).warnings == ()


def test_only_the_needed_tokens_are_requested(tmp_path: Path) -> None:
    """Where the widest layer has more inputs than rows x tokens, those are what to raise."""
    file = jsonl(tmp_path / "a.jsonl", {"text": "w1 " * 100})
    (warning,) = read_texts(file, folder_of(tmp_path / "model"), rows=2, tokens=8).warnings
    assert "gives 16 tokens in 2 rows, fewer than the 24 inputs" in warning
    assert warning.endswith("raise --rows or --tokens from 16 to 24 tokens or more in all")


def test_the_digest_is_that_of_ids_and_lengths() -> None:
    texts = Texts((torch.tensor([3, 4]), torch.tensor([5])), "here")
    expected = hashlib.sha256(struct.pack("<5q", 2, 3, 4, 1, 5)).hexdigest()
    assert texts.digest == expected
    assert Texts((torch.tensor([3]), torch.tensor([4, 5])), "here").digest != expected


def test_the_bundled_text_gives_rows(tmp_path: Path) -> None:
    texts = bundled_texts(folder_of(tmp_path / "model"))
    assert texts.tokens > 2000
    assert texts.warnings == ()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"x", r"expected a \.txt, \.md or \.jsonl file"),
        ("a.txt", b" \n\n ", "has no text"),
        ("a.jsonl", b"\n\n", "has no text"),
        ("a.txt", b"ab\xffcd", r"UTF-8, got byte 0xff at position 2"),
        ("a.jsonl", b'{"text": "w1"}\n{"text": \n', r"a\.jsonl, line 2: expected .*invalid JSON"),
        ("a.jsonl", b'{"text": "w1"}\n\n[1]\n', r"a\.jsonl, line 3: expected .*got \[1\]"),
        ("a.jsonl", b'{"text": 5}', r"line 1: expected"),
        ("a.jsonl", b'{"prompt": "w1"}', r"line 1: expected"),
        ("a.jsonl", b'{"messages": []}', r"line 1: expected"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}', r"line 1: expected"),
        (
            "a.jsonl",
            b'{"messages": [{"role": "user", "content": "w1"}]}',
            "line 1 has messages.*no chat template",
        ),
        ("a.jsonl", b'{"text": ""}', "into no tokens"),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1: the tokenizer in .* refuses this text"),
    ],
)
def test_files_of_no_use_are_refused(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=said):
        read_texts(tmp_path / name, folder)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read the calibration texts .*none\.txt: No such file"):
        read_texts(tmp_path / "none.txt", folder_of(tmp_path / "model"))


def test_messages_that_the_template_refuses_are_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "{{ raise_exception('roles must alternate') }}")
    file = jsonl(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "w1"}]})
    with pytest.raises(CheckpointError, match=r"line 1: the tokenizer in .* refuses this text: roles must"):
        read_texts(file, folder)


@pytest.mark.parametrize("stub", [None, "{}"])
def test_a_folder_without_a_tokenizer_is_refused(stub: str | None, tmp_path: Path) -> None:
    TINY[0].make_config().save_pretrained(tmp_path / "model")
    if stub is not None:
        (tmp_path / "model" / "tokenizer.json").write_text(stub)
    file = jsonl(tmp_path / "a.jsonl", {"text": "w1"})
    with pytest.raises(CheckpointError, match=r"the tokenizer in .* cannot be loaded"):
        read_texts(file, tmp_path / "model")


@pytest.mark.parametrize(("rows", "tokens"), [(0, 5), (5, 0)])
def test_nothing_asked_for_is_refused(rows: int, tokens: int, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="at least 1 row of at least 1 token"):
        read_texts(tmp_path / "a.txt", tmp_path, rows, tokens)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "{% for n in range(99999) %}{% for m in range(99999) %}{% endfor %}{% endfor %}",
            "more than 0.3 s of CPU",
        ),
        ("{{ ('a' * 4000000000) | length }}", "more than 1024 MiB of memory"),
    ],
)
def test_a_chat_template_s_time_and_memory_are_bounded(
    template: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited, "CPU_S", 0.3)
    monkeypatch.setattr(limited, "MEMORY_BYTES", 1 << 30)
    before = resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGPROF)
    file = jsonl(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "w1"}]})
    with pytest.raises(CheckpointError, match=said):
        read_texts(file, folder_of(tmp_path / "model", template))
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert (resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGPROF)) == before


def test_a_template_makes_at_most_one_token_for_each_byte_of_its_file(tmp_path: Path) -> None:
    """This much memory was reserved for the texts."""
    folder = folder_of(tmp_path / "model", "{% for n in range(9999) %}w1 w2 {% endfor %}")
    file = jsonl(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "w1"}]})
    assert read_texts(file, folder).tokens == file.stat().st_size
    plain = jsonl(tmp_path / "b.jsonl", {"messages": [{"role": "user", "content": "w1"}]})
    assert ids_of(read_texts(plain, folder_of(tmp_path / "usual", TEMPLATE))) == [[40, 1]]
