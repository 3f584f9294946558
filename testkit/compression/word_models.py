"""Tiny models with a tokenizer of whole words, and texts of these words, for calibration."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from testkit import random_variants as make
from testkit.gemma3_models import write_gemma3

WORDS = [f"w{n}" for n in range(60)]


def write_pair(folder: Path, strength: float = 0.12) -> tuple[Path, Path]:
    """A base and a fine-tune of it."""
    base = make.write_tiny_base(folder / "base", rms_norm_eps=1e-6)
    words = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(base)
    return base, make.write_tuned(base, folder / "tuned", 1, strength)


def write_gemma3_pair(folder: Path) -> tuple[Path, Path]:
    """The same for Gemma 3, whose layers use sliding windows in turn."""
    base = write_gemma3(folder / "base", num_hidden_layers=2)
    return base, make.write_tuned(base, folder / "tuned", 1)


def write_texts(path: Path, rows: int = 24, words: int = 40) -> Path:
    """Paragraphs of random words, each as long as a row."""
    draw = random.Random(7)
    path.write_text("\n\n".join(" ".join(draw.choices(WORDS, k=words)) for _ in range(rows)))
    return path
