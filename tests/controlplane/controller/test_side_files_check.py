"""Registration tries tokenizers and chat templates in a second process with limits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane import errors
from controlplane.controller import child_process, side_files_check
from controlplane.controller.file_reader import FileReader
from controlplane.controller.registration import Limits
from controlplane.state.records import Model, Phase
from testkit.controlplane.builders import base, no_bundles, variant
from workers.engine.side_files_check import CORRECTED, NOT_COMPARED

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def reader() -> Iterator[FileReader]:
    reader = FileReader()
    yield reader
    reader.close()


def written(files: Path, folder: Path, **more: str) -> Path:
    """The model in `files`/base as the folder base of `folder`, with these files (`__` is a dot)."""
    shutil.copytree(files / "base", folder / "base")
    for name, text in more.items():
        (folder / "base" / name.replace("__", ".")).write_text(text)
    return folder


def read(reader: FileReader, folder: Path, compare: bool = False) -> Model:
    return reader.read_now(base(folder), None, Limits((folder,), 16, compare), no_bundles)


def words(pattern: str | None = None, **more: Any) -> str:
    """A tokenizer.json of one word, that splits text by this expression."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": split if pattern else None,
            "model": model,
            **more,
        }
    )


def test_a_good_model_is_ready_and_the_second_one_is_free(
    reader: FileReader, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    made = {
        "tokenizer__json": words(r"\p{L}+|\s+(?!\S)"),
        "tokenizer_config__json": settings,
        "chat_template__jinja": CHAT,
    }
    first = read(reader, written(files, tmp_path / "1", **made), compare=True)
    assert (first.phase, CORRECTED in first.reason) == (Phase.READY, False)
    monkeypatch.setattr(side_files_check, "ChildProcess", None)  # no further process can be started
    assert read(reader, written(files, tmp_path / "2", **made), compare=True).phase is Phase.READY


def test_a_class_that_changes_ids_is_reported(reader: FileReader, files: Path, tmp_path: Path) -> None:
    """transformers 5 makes Llama's rules of a byte-level file that is labelled so."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    made = Tokenizer(models.BPE({c: n for n, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    named = json.dumps({"tokenizer_class": "LlamaTokenizerFast"})
    folder = written(files, tmp_path, tokenizer__json=made.to_str(), tokenizer_config__json=named)
    assert CORRECTED not in read(reader, folder).reason
    assert CORRECTED in read(reader, folder, compare=True).reason


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"chat_template__jinja": "{% for %}"}, r"chat template 'default' in .* cannot be used: Expected"),
        ({"chat_template__jinja": "{{ 'x' * 2000000000 }}"}, "more than 4194304 characters"),
        ({"chat_template__jinja": "{% set n = 999 %}{{ ' ' * (n * 2000000) }}"}, "512 MiB of memory"),
        (
            {
                "tokenizer_config__json": json.dumps(
                    {
                        "chat_template": [
                            {"name": "default", "template": CHAT},
                            {"name": "tool_use", "template": "{% if"},
                        ]
                    }
                )
            },
            "chat template 'tool_use'",
        ),
        ({"tokenizer__json": words(r"(a+)+$")}, "is too slow"),
        ({"tokenizer__json": words(r"\s+$")}, "4 times as much of the text ' ' takes"),
        (
            {
                "tokenizer__json": words(
                    None, normalizer={"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": ""}
                )
            },
            "is too slow",
        ),
    ],
)
def test_files_that_would_stall_an_engine_are_refused(
    reader: FileReader, files: Path, tmp_path: Path, more: dict[str, str], said: str
) -> None:
    with pytest.raises(errors.SourceUnreadable, match=said):
        read(reader, written(files, tmp_path, **more))


@pytest.mark.slow
def test_a_template_that_does_not_end_is_killed_by_its_time(
    reader: FileReader, files: Path, tmp_path: Path
) -> None:
    """The next model is read normally."""
    with pytest.raises(errors.SourceUnreadable, match="took more than 5 s of CPU time") as refusal:
        read(reader, written(files, tmp_path / "1", chat_template__jinja=ENDLESS))
    assert refusal.value.param == "source"
    # jinja2 itself refuses this template, at each chat: clients get the error, and nothing is delayed.
    huge = "{% for _ in range(10**9) %}{% endfor %}"
    assert read(reader, written(files, tmp_path / "2", chat_template__jinja=huge)).phase is Phase.READY


def test_a_variants_files_are_tried_too(reader: FileReader, files: Path, tmp_path: Path) -> None:
    shutil.copytree(files, tmp_path / "all", symlinks=True)
    folder, limits = tmp_path / "all", Limits((tmp_path / "all",), 16)
    host = read(reader, folder)
    asked = variant(folder, "v1")
    assert reader.read_now(asked, host, limits, no_bundles).phase is Phase.READY
    (folder / "v1" / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(errors.SourceUnreadable, match="Expected an expression") as refusal:
        reader.read_now(asked, host, limits, no_bundles)
    assert refusal.value.param == "adapter"


def test_without_transformers_the_check_names_who_compares(
    reader: FileReader, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control plane on a host of its own: its Python path hides the package."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'transformers' else find(name, *more)\n"
    )
    plain = child_process._environment()
    path = f"{hidden}:{plain['PYTHONPATH']}"
    monkeypatch.setattr(child_process, "_environment", lambda: {**plain, "PYTHONPATH": path})
    model = read(reader, written(files, tmp_path / "model", tokenizer__json=words()), compare=True)
    assert NOT_COMPARED in model.reason
    assert model.phase is Phase.READY
