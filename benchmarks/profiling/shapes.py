"""Architectures of 3B to 30B parameters, as their config.json has them, and a tiny one to rehearse with."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.gpu_engine import TOKENIZER, write_tokenizer
from profiler.architectures.registry import describe
from profiler.checkpoint import spec_of
from profiler.fingerprints.folder import write_fingerprint
from profiler.types import ModelSpec

LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
ROPE_OF_LLAMA_3: dict[str, Any] = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6}
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "rms_norm_eps": 1e-6,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "head_dim": 128,
}


def shape(
    family: dict[str, Any], layers: int, hidden: int, inner: int, heads: int, kv: int, vocab: int
) -> dict[str, Any]:
    return {
        **family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }


SHAPES = {
    "tiny": shape(LLAMA, 8, 256, 512, 4, 2, 2048),
    "smollm2-135m": shape(LLAMA, 30, 576, 1536, 9, 3, 49152),
    "llama-3.2-3b": shape(LLAMA, 28, 3072, 8192, 24, 8, 128256),
    "llama-3.1-8b": {
        **shape(LLAMA, 32, 4096, 14336, 32, 8, 128256),
        **ROPE_OF_LLAMA_3,
        "max_position_embeddings": 131072,
    },
    "llama-2-7b": shape(LLAMA, 32, 4096, 11008, 32, 32, 32000),
    "qwen2.5-14b": shape(QWEN2, 48, 5120, 13824, 40, 8, 152064),
    "qwen3-30b-a3b": shape(QWEN3_MOE, 48, 2048, 6144, 32, 4, 151936),
}
GPU_SHAPES = ("llama-2-7b", "qwen2.5-14b", "qwen3-30b-a3b", "llama-3.2-3b")


@cache
def spec(name: str, dtype_bytes: int = 2) -> ModelSpec:
    return spec_of(describe(SHAPES[name], Path(name)), dtype_bytes)


def folder(name: str, layers: int, at: Path) -> Path:
    """Config and tokenizer of the shape with its first `layers` layers, without weights, below `at`."""
    whole, made = at / name, at / f"{name}-{layers}"
    if not made.exists():
        whole.mkdir(parents=True, exist_ok=True)
        (whole / "config.json").write_text(json.dumps(SHAPES[name]))
        write_tokenizer(whole / TOKENIZER, SHAPES[name]["vocab_size"])
        write_fingerprint(whole, made, layers)
    return made
