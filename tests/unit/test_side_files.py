"""The files that a variant's folder has in addition to weights: reported at registration, kept by compressing
and merging."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import GenerationConfig

from controlplane import errors
from controlplane.controller.registration import Limits, read_model_files
from controlplane.state.records import Model, Phase
from profiler.errors import CheckpointError
from profiler.variants.side_files import chat_template, own_words, side_files, write_together
from testkit import random_variants as make
from testkit.random_adapters import RandomLora
from tests.unit.test_tokenizer_file import ROWS, WORDS
from workers.compression.job import Job, compress
from workers.compression.methods.magnitude import magnitude
from workers.deltas.merge import merge

FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)


def tokenizer(folder: Path, words: dict[str, int], added: dict[str, int], **settings: object) -> None:
    document = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": t, **FLAGS, "special": True} for t, i in added.items()],
        "model": {"type": "WordLevel", "vocab": {**words, **added}, "unk_token": "w2"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w1", **settings}))


FEW = {word: number for word, number in WORDS.items() if number < 60}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = make.write_tiny_base(tmp_path / "base")
    tokenizer(folder, FEW, {}, chat_template="base's")
    (folder / "generation_config.json").write_text('{"eos_token_id": 1, "temperature": 0.6}')
    return folder


@pytest.fixture
def adapter(tmp_path: Path, base: Path) -> Path:
    return make.write(base, tmp_path / "lora", RandomLora("a", 4, 1))


def registered(base: Path, adapter: Path) -> Model:
    limits = Limits((base.parent,), 16)
    known = read_model_files(Model("b", 1, Phase.PENDING, source=f"file://{base}"), None, limits, Path)
    variant = Model("v", 2, Phase.PENDING, base="b", adapter=f"file://{adapter}")
    return read_model_files(variant, known, limits, Path)


def test_registering_lists_the_variant_s_own_settings_and_their_files(base: Path, adapter: Path) -> None:
    assert "its own" not in registered(base, adapter).reason
    tokenizer(adapter, FEW, {"<think>": 61}, eos_token={"content": "w8"}, pad_token="[PAD]")
    (adapter / "chat_template.jinja").write_text("own")
    (adapter / "generation_config.json").write_text(
        '{"eos_token_id": [8, 1], "temperature": 0.6, "top_p": 0.9}'
    )
    assert registered(base, adapter).reason.endswith(
        "fits 'b'; answers with its own chat template (chat_template.jinja), tokens '<think>' (61) "
        "(tokenizer.json), end 'w8' (tokenizer_config.json), ends 1, 8 (generation_config.json), "
        "top_p 0.9 (generation_config.json)"
    )


def configured(folder: Path, **changes: object) -> None:
    """Give the folder its base's config.json with other settings."""
    config = json.loads((folder.parent / "base" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"eos_token_id": [8, 1]},
        {"eos_token_id": 8},
        {"eos_token_id": None, "text_config": {"eos_token_id": [8]}},
    ],
)
def test_end_tokens_in_config_json_count_as_in_transformers(
    tmp_path: Path, base: Path, adapter: Path, changes: dict[str, object]
) -> None:
    configured(adapter, **changes)
    found = json.loads((adapter / "config.json").read_text())
    expected = GenerationConfig.from_model_config(found).eos_token_id
    ends = expected if isinstance(expected, list) else [expected]
    assert own_words(adapter, base, ROWS) == (f"ends {', '.join(map(str, sorted(ends)))} (config.json)",)
    write_together(base, adapter, tmp_path / "made")
    written = json.loads((tmp_path / "made" / "generation_config.json").read_text())
    assert written == {"eos_token_id": expected, "temperature": 0.6}, "the base's other settings stay"


def test_a_generation_config_is_read_instead_of_config_json(base: Path, adapter: Path) -> None:
    configured(adapter, eos_token_id=8)
    (adapter / "generation_config.json").write_text('{"eos_token_id": [9]}')
    assert own_words(adapter, base, ROWS) == ("ends 9 (generation_config.json)",)


def test_a_copy_of_the_base_s_config_is_not_the_variants_own(
    tmp_path: Path, base: Path, adapter: Path
) -> None:
    (base / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    configured(base, eos_token_id=1)
    configured(adapter, eos_token_id=[1])
    assert own_words(adapter, base, ROWS) == ()
    write_together(base, adapter, tmp_path / "made")
    written = json.loads((tmp_path / "made" / "generation_config.json").read_text())
    assert written == {"eos_token_id": [1, 2]}


def test_equal_files_are_not_the_variants_own(base: Path, adapter: Path) -> None:
    for name in side_files(base):
        (adapter / name).write_bytes((base / name).read_bytes())
    assert own_words(adapter, base, ROWS) == ()


def test_a_token_without_a_row_is_refused_by_name(base: Path, adapter: Path) -> None:
    tokenizer(adapter, FEW, {"<think>": ROWS, "[PAD]": ROWS + 1}, pad_token="[PAD]")
    with pytest.raises(errors.AdapterMismatch, match=r"has '<think>' \(64\), but the base's vocabulary"):
        registered(base, adapter)
    tokenizer(adapter, FEW, {"[PAD]": ROWS}, pad_token="[PAD]")
    assert "without rows" in registered(base, adapter).reason


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("generation_config.json", '{"eos_token_id": "x"}', "expected eos_token_id to be a token id"),
        ("generation_config.json", "{", r"generation_config\.json is not valid JSON"),
        ("config.json", '{"eos_token_id": "x"}', r"config\.json: expected eos_token_id to be a token id"),
        (
            "tokenizer.json",
            "version https://git-lfs.github.com/spec/v1",
            r"tokenizer\.json is not a valid tokenizer",
        ),
        ("chat_template.jinja", b"\xff", "is not UTF-8 text"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    base: Path, adapter: Path, name: str, text: str | bytes, named: str
) -> None:
    (adapter / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(errors.SourceUnreadable, match=named):
        registered(base, adapter)


def test_together_they_are_the_variants_and_what_it_lacks(tmp_path: Path, base: Path, adapter: Path) -> None:
    (base / "added_tokens.json").write_text("{}")
    tokenizer(adapter, FEW, {"<think>": 61})
    write_together(base, adapter, tmp_path / "made")
    made = tmp_path / "made"
    assert set(side_files(made)) == {
        *("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
    }, "the base's added tokens are not those of the variant's tokenizer"
    assert (made / "tokenizer.json").read_bytes() == (adapter / "tokenizer.json").read_bytes()
    assert chat_template(made) == ("base's", "chat_template.jinja"), "it was in the base's settings"
    (adapter / "chat_template.json").write_text('{"chat_template": "own"}')
    write_together(base, adapter, made)
    assert chat_template(made).text == "own"


def test_a_link_that_leads_out_is_not_followed(tmp_path: Path, base: Path, adapter: Path) -> None:
    (tmp_path / "secret").write_text("{}")
    for name in ("generation_config.json", "config.json"):
        (adapter / name).symlink_to(tmp_path / "secret")
        with pytest.raises(CheckpointError, match="outside"):
            write_together(base, adapter, tmp_path / "made", (adapter,))
        (adapter / name).unlink()


def test_compressing_and_merging_keep_what_the_fine_tune_brings(tmp_path: Path, base: Path) -> None:
    tuned = make.write_tuned(base, tmp_path / "tuned", 3, 0.05)
    for name in side_files(base):
        (tuned / name).write_bytes((base / name).read_bytes())
    (tuned / "chat_template.jinja").write_text("own")
    (tuned / "generation_config.json").write_text('{"eos_token_id": [8, 1]}')
    compress(Job(base, tuned, tmp_path / "delta", magnitude(), force=True))
    assert set(side_files(tmp_path / "delta")) == {"chat_template.jinja", "generation_config.json"}
    assert own_words(tmp_path / "delta", base, ROWS) == own_words(tuned, base, ROWS) != ()
    merge(base, tmp_path / "delta", tmp_path / "merged")
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "merged" / name).read_bytes() == (tuned / name).read_bytes()


def test_compressing_and_merging_keep_end_tokens_of_a_config(tmp_path: Path, base: Path) -> None:
    tuned = make.write_tuned(base, tmp_path / "tuned", 3, 0.05)
    (tuned / "generation_config.json").unlink()
    config = json.loads((tuned / "config.json").read_text())
    (tuned / "config.json").write_text(json.dumps({**config, "eos_token_id": 8}))
    compress(Job(base, tuned, tmp_path / "delta", magnitude(), force=True))
    merge(base, tmp_path / "delta", tmp_path / "merged")
    for folder in (tmp_path / "delta", tmp_path / "merged"):
        assert GenerationConfig.from_pretrained(folder).eos_token_id == 8


def test_merging_an_adapter_keeps_its_template(tmp_path: Path, base: Path, adapter: Path) -> None:
    (adapter / "chat_template.jinja").write_text("own")
    merge(base, adapter, tmp_path / "merged")
    assert chat_template(tmp_path / "merged").text == "own"
