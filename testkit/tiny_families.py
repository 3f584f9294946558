"""Tiny models of every supported family, made and written by transformers: the reference for ours."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testkit.tiny_tokenizers import ONE_WORD

SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
NO_GROUPS = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
FALCON = {
    key: value
    for key, value in NO_GROUPS.items()
    if key not in ("intermediate_size", "max_position_embeddings")
}
MOE = {**SIZES, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
BIASES = {"attention_bias": True, "mlp_bias": True}
WINDOW = {"use_sliding_window": True, "sliding_window": 8}
GEMMA3 = {**SIZES, "sliding_window": 8}
UNTIED_GEMMA3 = {"tie_word_embeddings": False, "num_key_value_heads": 1, "attention_bias": True}
GPTJ = {"n_layer": 3, "n_embd": 16, "n_head": 4, "n_positions": 64, "rotary_dim": 4, "vocab_size": 40}


@dataclass(frozen=True)
class Tiny:
    """`family` is transformers' prefix of classes (Llama, Qwen2Moe), `config` that of its config's class."""

    family: str
    settings: dict[str, Any]
    config: str = ""
    title: str = ""

    @property
    def architecture(self) -> str:
        return f"{self.family}ForCausalLM"

    @property
    def id(self) -> str:
        return f"{self.family} {self.title}".strip()

    def make_config(self, **changes: Any) -> Any:
        import transformers

        cls = getattr(transformers, f"{self.config or self.family}Config")
        config = cls(**{**self.settings, **changes})
        config.architectures = [self.architecture]
        return config

    def build(self, config: Any | None = None) -> Any:
        """The model, on the meta device: no memory, no arithmetic."""
        import torch
        import transformers

        with torch.device("meta"):
            return getattr(transformers, self.architecture)(config or self.make_config())

    def write(self, folder: Path, **changes: Any) -> Path:
        """A checkpoint of random weights as save_pretrained writes it, with the stub of a tokenizer."""
        import transformers

        model = getattr(transformers, self.architecture)(self.make_config(**changes))
        with contextlib.redirect_stderr(io.StringIO()):
            model.save_pretrained(folder)
        (folder / "tokenizer.json").write_text(ONE_WORD)
        return folder


def _tiny(family: str, settings: dict[str, Any], title: str = "", config: str = "", **changes: Any) -> Tiny:
    return Tiny(family, {**settings, **changes}, config, title)


TINY: tuple[Tiny, ...] = (
    _tiny("Llama", SIZES),
    _tiny("Llama", {**SIZES, **BIASES}, "tied, biases, wide heads", tie_word_embeddings=True, head_dim=6),
    _tiny("Mistral", SIZES),
    _tiny("Mistral", SIZES, "one KV head, no window", num_key_value_heads=1, sliding_window=None),
    _tiny("Qwen2", SIZES),
    _tiny("Qwen2", SIZES, "tied", tie_word_embeddings=True),
    _tiny("Qwen3", SIZES),
    _tiny("Qwen3", {**SIZES, **WINDOW}, "windows", head_dim=6, max_window_layers=1),
    _tiny("Gemma", SIZES, head_dim=6),
    _tiny("Gemma", SIZES, "one KV head", num_key_value_heads=1),
    _tiny("Gemma2", SIZES, head_dim=6),
    _tiny("Gemma2", SIZES, "biases", head_dim=6, attention_bias=True),
    _tiny("Gemma3", SIZES, config="Gemma3Text", head_dim=6),
    _tiny("Gemma3", GEMMA3, "window, every second", "Gemma3Text", sliding_window_pattern=2),
    _tiny("Gemma3", GEMMA3, "untied, one KV head", "Gemma3Text", **UNTIED_GEMMA3),
    _tiny("Phi", NO_GROUPS, intermediate_size=64),
    _tiny("Phi3", SIZES),
    _tiny("Phi3", SIZES, "tied, window", tie_word_embeddings=True, sliding_window=8),
    _tiny("Falcon", FALCON, "7B"),
    _tiny("Falcon", FALCON, "40B", num_kv_heads=2, new_decoder_architecture=True, bias=True),
    _tiny(
        "Falcon",
        FALCON,
        "11B",
        num_kv_heads=2,
        new_decoder_architecture=True,
        num_ln_in_parallel_attn=1,
        tie_word_embeddings=False,
        ffn_hidden_size=24,
    ),
    _tiny("Falcon", FALCON, "RW", multi_query=False, parallel_attn=False, alibi=True, bias=True),
    _tiny("GPTJ", GPTJ),
    _tiny("GPTJ", GPTJ, "inner width", n_inner=24),
    _tiny("GPTNeoX", NO_GROUPS),
    _tiny("GPTNeoX", NO_GROUPS, "tied, no biases", tie_word_embeddings=True, attention_bias=False),
    _tiny("Mixtral", SIZES, num_local_experts=3),
    _tiny("Mixtral", SIZES, "tied, wide heads", num_local_experts=4, head_dim=6, tie_word_embeddings=True),
    _tiny("Qwen2Moe", MOE, shared_expert_intermediate_size=14),
    _tiny("Qwen3Moe", MOE, head_dim=6),
    _tiny("Qwen3Moe", MOE, "tied", tie_word_embeddings=True),
)

# Sizes as published, and how many parameters those models have by the count of their authors' checkpoints.
PUBLISHED: dict[str, tuple[Tiny, int]] = {
    "Llama-3.1-8B": (
        _tiny(
            "Llama",
            {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256},
            num_attention_heads=32,
            num_key_value_heads=8,
        ),
        8_030_261_248,
    ),
    "Gemma-2-2B": (_tiny("Gemma2", {}), 2_614_341_888),
    "Falcon-7B": (_tiny("Falcon", {}), 6_921_720_704),
    "Phi-3-mini": (_tiny("Phi3", {}), 3_821_079_552),
    "GPT-J-6B": (_tiny("GPTJ", {}), 6_050_882_784),
    "Mixtral-8x7B": (_tiny("Mixtral", {}), 46_702_792_704),
    "Qwen3-30B-A3B": (
        _tiny("Qwen3Moe", {"num_hidden_layers": 48, "head_dim": 128, "num_key_value_heads": 4}),
        30_532_122_624,
    ),
}
