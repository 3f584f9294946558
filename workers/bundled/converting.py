"""Creates the Hugging Face folder of a bundled model from the GGUF inside a package, once per cache."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Progress = Callable[[str], None]
LEFT_OVERS = ("quantization_config", "_model_name_or_path", "name_or_path")


def silent(message: str) -> None:
    """Drop a progress message."""


def ensure(name: str, cache_dir: Path, convert: Callable[[Path], None], progress: Progress) -> Path:
    """The folder `name` under `cache_dir`; `convert` fills it at first use.

    It is built in the same parent folder and then renamed, so it is whole or absent. Processes may race: each
    builds in its own directory, and the first rename wins.
    """
    final = cache_dir / name
    if final.is_dir():
        return final
    cache_dir.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=cache_dir))
    try:
        convert(building)
        building.chmod(0o755)
        for file in building.iterdir():
            file.chmod(0o644)  # safetensors writes 0600
        _publish(building, final)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    progress(f"{name} is ready in {final}")
    return final


def _publish(building: Path, final: Path) -> None:
    try:
        os.rename(building, final)
    except OSError:
        if not final.is_dir():  # another process may have been faster; any other error counts
            raise


def package_folder(package: str) -> Path | None:
    """The folder of an installed package, found without importing it; None if it is not installed."""
    spec = find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def save_config(config: Any, architecture: str, target: Path) -> None:
    """Save the config of a checkpoint in bfloat16 whose head is its embedding, with the end tokens."""
    from transformers import GenerationConfig

    config.architectures = [architecture]
    config.dtype = "bfloat16"
    config.tie_word_embeddings = True
    for left_over in LEFT_OVERS:
        config.__dict__.pop(left_over, None)
    config.save_pretrained(target)
    ends = {"eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id}
    GenerationConfig(bos_token_id=config.bos_token_id, **ends).save_pretrained(target)


def dequantized(source: Path) -> Iterator[tuple[str, Any]]:
    """Every tensor of a GGUF by its name there, in float32."""
    import torch
    from gguf import GGUFReader, dequantize

    for tensor in GGUFReader(str(source)).tensors:
        yield tensor.name, torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())


def save_weights(tensors: dict[str, Any], target: Path) -> None:
    """Save the tensors in bfloat16."""
    import torch
    from safetensors.torch import save_file

    stored = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})


def hf_name(name: str, outer: dict[str, str], in_layer: dict[str, str]) -> str:
    """The Hugging Face name of a tensor `blk.N.MODULE.weight`, or of one outside of layers."""
    if name in outer:
        return outer[name]
    _, layer, module, suffix = name.split(".")
    return f"model.layers.{layer}.{in_layer[module]}.{suffix}"
