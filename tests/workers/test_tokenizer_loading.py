"""A tokenizer's ids are those of its tokenizer.json, whatever class its config and the model's type name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from profiler.errors import CheckpointError
from testkit import random_variants
from workers.compression.calibration.texts import read_texts
from workers.tokenizer_loading import TEXTS, difference, load_tokenizer, served_folder

# The split of the tokenizer.json of DeepSeek-R1-Distill-Llama.
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


def test_a_correct_tokenizer_is_served_unchanged(tmp_path: Path, byte_level: Path) -> None:
    folder = labelled(byte_level, tmp_path / "model", "PreTrainedTokenizerFast", "llama")
    assert served_folder(folder, tmp_path / "served") == folder
    assert not (tmp_path / "served").exists()


def test_the_sample_texts_reveal_a_class_that_changes_ids(tmp_path: Path, byte_level: Path) -> None:
    """transformers 5's own choice, if it still loses spaces, is found out; else nothing is to be mended."""
    folder = labelled(byte_level, tmp_path / "model", "LlamaTokenizerFast", "llama")
    chosen = AutoTokenizer.from_pretrained(folder)
    keeps = chosen.decode(chosen.encode("quick fox", add_special_tokens=False)) == "quick fox"
    assert (difference(chosen, folder) is None) == keeps


def pieces(folder: Path, model_type: str) -> Path:
    """A SentencePiece model alone, as Llama 2 and the first Mistral have it."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder.mkdir()
    texts = [f"the quick brown fox jumps over the lazy dog and runs away from it {n}" for n in range(300)]
    (folder.parent / "texts").write_text("\n".join(texts))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder.parent / "texts"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "legacy": True}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "unk_token": "<unk>"}))
    (folder / "config.json").write_text(json.dumps({**random_variants.TINY, "model_type": model_type}))
    return folder


@pytest.mark.parametrize("model_type", ["llama", "mistral", "mixtral", "phi3", "qwen3"])
def test_a_sentencepiece_model_alone_gives_its_own_ids(tmp_path: Path, model_type: str) -> None:
    folder = pieces(tmp_path / "model", model_type)
    truth = pytest.importorskip("sentencepiece").SentencePieceProcessor(
        model_file=str(folder / "tokenizer.model")
    )
    served = AutoTokenizer.from_pretrained(served_folder(folder, tmp_path / "served"))
    for tokenizer in (load_tokenizer(folder), served):
        for text in ("the quick brown fox", "naïve 世界 runs"):
            assert tokenizer.encode(text, add_special_tokens=False) == truth.encode(text)


def test_a_sentencepiece_model_that_no_class_reads_rightly_is_refused(tmp_path: Path) -> None:
    """Gemma's class puts no space before a text, as this model does."""
    folder = pieces(tmp_path / "model", "gemma")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, "tokenizer_class": "GemmaTokenizer"})
    )
    with pytest.raises(
        CheckpointError, match=r"no tokenizer class of transformers gives the ids of .*tokenizer\.model"
    ):
        load_tokenizer(folder)


def test_special_tokens_of_the_config_are_no_difference(tmp_path: Path) -> None:
    folder = labelled_words(tmp_path / "model")
    assert served_folder(folder, tmp_path / "served") == folder
    assert load_tokenizer(folder).encode("w5 w6 w9", add_special_tokens=False) == [5, 6, 2]


def labelled_words(folder: Path) -> Path:
    """Most texts are unknown words here, and the config makes that word special."""
    folder.mkdir()
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(8)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w2", "eos_token": "w1"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(random_variants.TINY))
    return folder


def test_calibration_reads_texts_with_it(tmp_path: Path, byte_level: Path) -> None:
    folder = labelled(byte_level, tmp_path / "model", "LlamaTokenizerFast", "llama")
    text = "the quick brown fox runs away"
    (tmp_path / "texts.txt").write_text(text)
    (row,) = read_texts(tmp_path / "texts.txt", folder).rows
    assert row.tolist() == Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids


@pytest.mark.parametrize(
    "stub", ["{}", "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 17"]
)
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, byte_level: Path, stub: str) -> None:
    folder = labelled(byte_level, tmp_path / "model", "LlamaTokenizerFast", "llama")
    (folder / "tokenizer.json").write_text(stub)
    with pytest.raises(CheckpointError, match=r"the tokenizer in .*model cannot be loaded"):
        load_tokenizer(folder)
