"""Builds real, tiny checkpoints and adapters on disk with numpy. Shapes are written out by hand here, so
that the tests do not share the code under test."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from safetensors.numpy import save_file

from profiler.variants.types import Manifest
from profiler.variants.verifying import check_finite, read_file, tensors_of
from testkit.tiny_tokenizers import ONE_WORD

Tensors = dict[str, np.ndarray]

# Any JSON value, for fuzzing.
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
TINY = {
    **SMOLLM2,
    "num_hidden_layers": 2,
    "hidden_size": 12,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 20,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
}


def config(**changes: Any) -> dict[str, Any]:
    return {**TINY, **changes}


def tensors(
    cfg: dict[str, Any], *, qkv_bias: bool = False, qk_norm: bool = False
) -> dict[str, tuple[int, ...]]:
    """The shapes of every tensor that transformers would save for `cfg`."""
    h, i, v = cfg["hidden_size"], cfg["intermediate_size"], cfg["vocab_size"]
    d = cfg.get("head_dim", h // cfg["num_attention_heads"])
    q, kv = cfg["num_attention_heads"] * d, cfg["num_key_value_heads"] * d
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, h), "model.norm.weight": (h,)}
    if not cfg["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, h)
    for n in range(cfg["num_hidden_layers"]):
        at = f"model.layers.{n}"
        shapes[f"{at}.input_layernorm.weight"] = (h,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (h,)
        shapes[f"{at}.self_attn.q_proj.weight"] = (q, h)
        shapes[f"{at}.self_attn.k_proj.weight"] = (kv, h)
        shapes[f"{at}.self_attn.v_proj.weight"] = (kv, h)
        shapes[f"{at}.self_attn.o_proj.weight"] = (h, q)
        shapes[f"{at}.mlp.gate_proj.weight"] = (i, h)
        shapes[f"{at}.mlp.up_proj.weight"] = (i, h)
        shapes[f"{at}.mlp.down_proj.weight"] = (h, i)
        if qkv_bias:
            shapes[f"{at}.self_attn.q_proj.bias"] = (q,)
            shapes[f"{at}.self_attn.k_proj.bias"] = (kv,)
            shapes[f"{at}.self_attn.v_proj.bias"] = (kv,)
        if qk_norm:
            shapes[f"{at}.self_attn.q_norm.weight"] = (d,)
            shapes[f"{at}.self_attn.k_norm.weight"] = (d,)
    return shapes


def zeros(shapes: dict[str, tuple[int, ...]], dtype: Any = np.float32) -> Tensors:
    return {name: np.zeros(shape, dtype) for name, shape in shapes.items()}


def write_model(
    folder: Path, cfg: dict[str, Any] | None = None, weights: Tensors | None = None, **kinds: bool
) -> Path:
    cfg = cfg or config()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(cfg))
    (folder / "tokenizer.json").write_text(ONE_WORD)
    save_file(zeros(tensors(cfg, **kinds)) if weights is None else weights, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, cfg: dict[str, Any] | None = None) -> Path:
    """The same checkpoint in two files with an index."""
    write_model(folder, cfg)
    (folder / "model.safetensors").unlink()
    every = zeros(tensors(cfg or config()))
    names = sorted(every)
    parts = {"model-1-of-2.safetensors": names[::2], "model-2-of-2.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: every[name] for name in held}, folder / file)
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def raw_safetensors(header: bytes | dict[str, Any], data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


LORA = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "down_proj"],
    "bias": "none",
}
TINY_LINEAR = {
    "q_proj": (12, 12), "k_proj": (4, 12), "v_proj": (4, 12), "o_proj": (12, 12),
    "gate_proj": (20, 12), "up_proj": (20, 12), "down_proj": (12, 20),
}  # fmt: skip


def pair(layer: int, module: str, rank: int = 4) -> Tensors:
    """lora_A (rank, in) and lora_B (out, rank) for a module of TINY."""
    block = "self_attn" if module[0] in "qkvo" else "mlp"
    out, into = TINY_LINEAR[module]
    at = f"base_model.model.model.layers.{layer}.{block}.{module}"
    return {
        f"{at}.lora_A.weight": np.zeros((rank, into), np.float32),
        f"{at}.lora_B.weight": np.zeros((out, rank), np.float32),
    }


def lora_weights() -> Tensors:
    return {**pair(0, "q_proj"), **pair(1, "q_proj"), **pair(0, "down_proj"), **pair(1, "down_proj")}


def write_adapter(
    folder: Path, changes: dict[str, Any] | None = None, weights: Tensors | None = None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**LORA, **(changes or {})}))
    save_file(lora_weights() if weights is None else weights, folder / "adapter_model.safetensors")
    return folder


def verify_values(manifest: Manifest) -> None:
    """Read every file of the variant: sizes, checksums, finite values. Raises CheckpointError."""
    for file in manifest.files:
        data = read_file(manifest.folder, file)
        check_finite(data, (ref for ref in tensors_of(manifest) if ref.file == file.name), manifest.folder)
