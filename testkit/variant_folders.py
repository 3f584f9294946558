"""Variants' folders for tests, written by hand: BOFT as PEFT writes it, and compressed deltas."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from safetensors.numpy import save_file

from profiler.checkpoint import read_model
from profiler.types import ModelSpec
from profiler.variants.types import VariantLimits
from testkit import checkpoints as make

LIMITS = VariantLimits(16)
CONFIG = make.config(
    architectures=["Qwen2ForCausalLM"], hidden_size=16, num_attention_heads=2, num_key_value_heads=1,
    intermediate_size=24,
)  # fmt: skip
EMBEDDING = "model.embed_tokens.weight"
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
Edit = Callable[[dict[str, Any]], None]


BOFT = {
    "peft_type": "BOFT", "boft_block_size": 4, "boft_block_num": 0, "boft_n_butterfly_factor": 2,
    "bias": "none", "target_modules": ["q_proj", "down_proj"],
}  # fmt: skip


def random_base(folder: Path) -> ModelSpec:
    """A base of `CONFIG` with random weights, biases of q, k and v among them."""
    shapes = make.tensors(CONFIG, qkv_bias=True)
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return read_model(make.write_model(folder, CONFIG, weights))


def boft_weights(factors: int = 2) -> make.Tensors:
    found = {}
    for layer in (0, 1):
        for module, out, into in (("self_attn.q_proj", 16, 16), ("mlp.down_proj", 16, 24)):
            at = f"base_model.model.model.layers.{layer}.{module}"
            found[f"{at}.boft_R"] = np.zeros((factors, into // 4, 4, 4), np.float32)
            found[f"{at}.boft_s"] = np.ones((out, 1), np.float32)
    return found


def write_boft(
    folder: Path, changes: dict[str, Any] | None = None, weights: make.Tensors | None = None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**BOFT, **(changes or {})}))
    save_file(boft_weights() if weights is None else weights, folder / "adapter_model.safetensors")
    return folder


def write_delta(folder: Path, base: ModelSpec, kind: str = "sparse_delta", edit: Edit | None = None) -> Path:
    """By hand, with q_proj in layer 0, down_proj in layer 1 and two full tensors; `edit`: of delta.json.

    The kind "differences" is a sparse delta with the embedding as a difference.
    """
    folder.mkdir(parents=True)
    differs = kind == "differences"
    kind = "sparse_delta" if differs else kind
    parts = _sparse_parts if kind == "sparse_delta" else _svd_parts
    held = {
        "layer-00000.safetensors": parts(Q, 16, 16),
        "layer-00001.safetensors": {
            **parts(DOWN, 16, 24),
            "model.layers.1.self_attn.k_proj.bias": np.zeros(8, np.float16),
        },
        "full.safetensors": {
            "model.norm.weight": np.ones(16, np.float32),
            **(_difference(base.other_shapes[EMBEDDING]) if differs else {}),
        },
    }
    for file, tensors in held.items():
        save_file(tensors, folder / file)
    groups = {"groups": [{"bits": 16, "rank": 1}, {"bits": 3, "rank": 2}]} if kind == "svd_delta" else {}
    raw = {
        **{"format": "ostinato-delta", "version": 3 if differs else 1, "kind": kind},
        **({"bits": 4, "group_size": None} if kind == "sparse_delta" else {"group_size": 128}),
        "base": {"fingerprint": base.fingerprint},
        "files": {file: described(folder / file) for file in held},
        "modules": {
            Q: {"file": "layer-00000.safetensors", **groups},
            DOWN: {"file": "layer-00001.safetensors", **groups},
        },
        "full": {
            "model.layers.1.self_attn.k_proj.bias": {"file": "layer-00001.safetensors"},
            "model.norm.weight": {"file": "full.safetensors"},
        },
        **({"differences": {EMBEDDING: {"file": "full.safetensors", "bits": 8}}} if differs else {}),
    }
    if edit:
        edit(raw)
    (folder / "delta.json").write_text(json.dumps(raw))
    return folder


def store_compressed(folder: Path, level: int = 3) -> Path:
    """The delta as version 2, every file of it compressed."""
    raw = json.loads((folder / "delta.json").read_text())
    for name, entry in raw["files"].items():
        packed = zstandard.ZstdCompressor(level=level).compress((folder / name).read_bytes())
        store_as(folder, name, packed, entry)
    (folder / "delta.json").write_text(json.dumps({**raw, "version": 2}))
    return folder


def store_as(folder: Path, name: str, packed: bytes, entry: dict[str, Any]) -> None:
    """`packed` in the place of the file `name`, described in `entry`, which is that of delta.json."""
    (folder / name).unlink(missing_ok=True)
    (folder / f"{name}.zst").write_bytes(packed)
    entry["compressed"] = {"encoding": "zstd", **described(folder / f"{name}.zst")}


def described(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    return {"size_bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}


def _sparse_parts(name: str, out: int, into: int) -> make.Tensors:
    return {
        f"{name}.values": np.zeros((out, into // 4), np.uint8),
        f"{name}.indices": np.zeros((out, into // 8), np.uint8),
        f"{name}.scales": np.zeros((out, 1), np.float16),
    }


def _difference(shape: tuple[int, ...]) -> make.Tensors:
    codes = np.arange(np.prod(shape)).astype(np.int8).reshape(shape)
    return {f"{EMBEDDING}.codes": codes, f"{EMBEDDING}.scales": np.ones(shape[0], np.float32)}


def _svd_parts(name: str, out: int, into: int) -> make.Tensors:
    parts = {f"{name}.g0.v": np.zeros((1, into), np.float16), f"{name}.g0.u": np.zeros((1, out), np.float16)}
    for side, n in (("v", into), ("u", out)):
        parts[f"{name}.g1.{side}"] = np.zeros((2, n // 8 * 3), np.uint8)
        parts[f"{name}.g1.{side}_scales"] = np.zeros((2, 1), np.float16)
        parts[f"{name}.g1.{side}_zeros"] = np.zeros((2, 1), np.uint8)
    return parts
