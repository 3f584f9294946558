"""Tiny Gemma 3 models whose windows, two ropes and norms all count, with a tokenizer of whole words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from testkit.tiny_families import Tiny

VOCABULARY, WINDOW, LAYERS = 96, 8, 3
# Sizes that vLLM's attention on CPU takes; large enough weights for tokens to differ. Layers 0 and 2 slide.
GEMMA3 = Tiny(
    "Gemma3",
    {
        "num_hidden_layers": LAYERS,
        "hidden_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "intermediate_size": 128,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 64,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    },
    "Gemma3Text",
)


def write_gemma3(folder: Path, **changes: Any) -> Path:
    """A checkpoint. Norms are not the zeros that transformers begins with, which would hide errors; the
    embedding is small enough that the tied head does not repeat each token."""
    torch.manual_seed(1)
    GEMMA3.write(folder, **changes)
    file = folder / "model.safetensors"
    tensors = {name: _livelier(name, weight) for name, weight in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w2"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w2").save_pretrained(folder)
    return folder


def _livelier(name: str, weight: torch.Tensor) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return weight + 0.3 * torch.randn_like(weight)
    return 0.4 * weight if name == "model.embed_tokens.weight" else weight
