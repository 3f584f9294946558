"""The facts that registration reads from a tokenizer.json, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from controlplane import errors
from controlplane.controller.registration import Limits, read_model_files
from controlplane.state.records import Model, Phase
from profiler.tokenizer_file import named, read_tokenizer
from testkit import random_variants
from testkit.tiny_tokenizers import ONE_WORD

ROWS = 64  # of the tiny base's embedding: a multiple of 64, as those of Llama 2 and 3 are
WORDS = {f"w{i}": i for i in range(ROWS)}
PAD = {
    "id": ROWS,
    "content": "[PAD]",
    **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
    "special": True,
}


def write(folder: Path, tokenizer: object) -> Path:
    base = random_variants.write_tiny_base(folder)
    text = tokenizer if isinstance(tokenizer, str) else json.dumps(tokenizer)
    (base / "tokenizer.json").write_text(text)
    return base


def with_pad() -> dict[str, object]:
    return {**json.loads(ONE_WORD), "added_tokens": [PAD]} | {
        "model": {"type": "WordLevel", "vocab": WORDS, "unk_token": "w2"}
    }


def registered(folder: Path) -> Model:
    model = Model("m", 1, Phase.PENDING, source=f"file://{folder}")
    limits = Limits((folder.parent,), 16)
    return read_model_files(model, None, limits, Path)


def test_registering_names_tokens_without_a_row(tmp_path: Path) -> None:
    found = registered(write(tmp_path / "padded", with_pad()))
    assert found.phase is Phase.READY
    assert found.reason.endswith(
        "; requests with '[PAD]' (64) are refused, because the vocabulary has no rows for them"
    )
    assert "no rows" not in registered(write(tmp_path / "plain", ONE_WORD)).reason


@pytest.mark.parametrize(
    "stub",
    ["{}", "[]", "", "version https://git-lfs.github.com/spec/v1\nsize 1\n", '{"model":'],
)
def test_registering_refuses_what_is_no_tokenizer(tmp_path: Path, stub: str) -> None:
    with pytest.raises(errors.SourceUnreadable, match=r"tokenizer\.json"):
        registered(write(tmp_path / "model", stub))


def test_a_folder_without_the_file_is_another_matter(tmp_path: Path) -> None:
    assert read_tokenizer(tmp_path) is None


def test_a_sentence_names_some_tokens() -> None:
    assert named({f"<{i}>": i for i in range(7)}).endswith("'<4>' (4) and 2 more")
