"""A tokenizer's ids are those of its tokenizer.json, whatever class its config and the model's type name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import random_variants
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from profiler.errors import CheckpointError
from workers.compression.calibration.texts import read_texts
from workers.tokenizer_loading import TEXTS, difference, load_tokenizer, served_folder

# As the tokenizer.json of DeepSeek-R1-Distill-Llama splits text.
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CLASSES = ("LlamaTokenizerFast", "LlamaTokenizer", "PreTrainedTokenizerFast", "GPT2Tokenizer", "NoSuchClass")
TYPES = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text")


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with such a tokenizer.json."""
    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    made.decoder = decoders.ByteLevel()
    words = [f"the quick brown fox jumps over the lazy dog. It runs away {n} times\n" for n in range(300)]
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|begin|>", "<|end|>"],
        show_progress=False,
    )
    made.train_from_iterator(words, trainer)
    folder = tmp_path_factory.mktemp("byte-level")
    made.save(str(folder / "tokenizer.json"))
    return folder


def labelled(source: Path, folder: Path, kind: str, model_type: str) -> Path:
    folder.mkdir()
    shutil.copy(source / "tokenizer.json", folder)
    settings = {"tokenizer_class": kind, "bos_token": "<|begin|>", "eos_token": "<|end|>", "legacy": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "config.json").write_text(json.dumps({**random_variants.TINY, "model_type": model_type}))
    return folder


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("kind", CLASSES)
def test_every_label_gives_the_ids_of_the_file(
    tmp_path: Path, byte_level: Path, kind: str, model_type: str
) -> None:
    folder = labelled(byte_level, tmp_path / "model", kind, model_type)
    truth = Tokenizer.from_file(str(folder / "tokenizer.json"))
    served = AutoTokenizer.from_pretrained(served_folder(folder, tmp_path / "served"))
    for tokenizer in (load_tokenizer(folder), served):
        for text in (*TEXTS, "the quick brown\nfox<|end|> runs"):
            ids = truth.encode(text, add_special_tokens=False).ids
            assert tokenizer.encode(text, add_special_tokens=False) == ids
            assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == truth.decode(
                ids, skip_special_tokens=False
            )
        assert (tokenizer.eos_token, tokenizer.chat_template) == ("<|end|>", "{{ messages }}")


def test_what_is_right_is_served_as_it_lies_there(tmp_path: Path, byte_level: Path) -> None:
    folder = labelled(byte_level, tmp_path / "model", "PreTrainedTokenizerFast", "llama")
    assert served_folder(folder, tmp_path / "served") == folder
    assert not (tmp_path / "served").exists()


def test_the_texts_tell_such_a_class_apart(tmp_path: Path, byte_level: Path) -> None:
    """transformers 5's own choice, if it still loses spaces, is found out; else nothing is to be mended."""
    folder = labelled(byte_level, tmp_path / "model", "LlamaTokenizerFast", "llama")
    chosen = AutoTokenizer.from_pretrained(folder)
    keeps = chosen.decode(chosen.encode("quick fox", add_special_tokens=False)) == "quick fox"
    assert (difference(chosen, folder / "tokenizer.json") is None) == keeps


def test_calibration_reads_texts_with_it(tmp_path: Path, byte_level: Path) -> None:
    folder = labelled(byte_level, tmp_path / "model", "LlamaTokenizerFast", "llama")
    text = "the quick brown fox runs away"
    (tmp_path / "texts.txt").write_text(text)
    (row,) = read_texts(tmp_path / "texts.txt", folder).rows
    assert row.tolist() == Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids


@pytest.mark.parametrize(
    "stub", ["{}", "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 17"]
)
def test_what_is_no_tokenizer_is_named(tmp_path: Path, byte_level: Path, stub: str) -> None:
    folder = labelled(byte_level, tmp_path / "model", "LlamaTokenizerFast", "llama")
    (folder / "tokenizer.json").write_text(stub)
    with pytest.raises(CheckpointError, match=r"expected a tokenizer in .*model, got"):
        load_tokenizer(folder)
