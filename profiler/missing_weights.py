"""What a folder holds in the place of weights that can be read, and what its owner can do about it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

MAX_NAMES = 2_000  # of a folder, that are looked at
EXPECTED = "expected model.safetensors, or model.safetensors.index.json with the files that it names"
SAVE = "load it with transformers and save it again with save_pretrained, which writes model.safetensors"
SHARD = re.compile(r"model-\d+-of-(\d+)\.safetensors")
VARIANT = re.compile(r"model\.\w{1,20}\.safetensors")


def no_weights(folder: Path) -> str:
    """The message for a folder without `model.safetensors` and without an index."""
    return f"{EXPECTED}, in {folder}; {_advice(folder, _names(folder))}"


def no_config(folder: Path) -> str:
    """The message for a folder without `config.json`."""
    expected, names = f"expected a file config.json in {folder}, found none", _names(folder)
    variant = next((name for name in ("adapter_config.json", "delta.json") if name in names), None)
    if variant is not None:
        return f"{expected}, but {variant}: this is a variant; register it with its base (--base)"
    if inner := _inner(folder, names):
        return f"{expected}, but one in {inner}; give that folder"
    if found := _first(names, suffix=".gguf"):
        return f"{expected}; found {found}, {_FORMATS['.gguf']}"
    return f"{expected}; download or copy all of the model's files into this folder"


def _advice(folder: Path, names: list[str]) -> str:
    """What was found, and what to do: the nearest to a checkpoint first."""
    if shards := [name for name in names if SHARD.fullmatch(name)]:
        return (
            f"found {shards[0]} but no index, without which the files of a model cannot be told from "
            "leftovers; download model.safetensors.index.json from where the files come from, or save the "
            "model again with save_pretrained"
        )
    if found := next((name for name in names if VARIANT.fullmatch(name)), None):
        return (
            f"found {found}, which transformers reads only when it is asked for that variant; rename it to "
            f"{VARIANT.sub(r'model.safetensors', found)}"
        )
    if found := _first(names, prefix="consolidated", suffix=".safetensors"):
        return (
            f"found {found}, weights in Mistral's own layout, whose tensors have other names; download the "
            "model's files for transformers (model-*.safetensors and their index), or convert it with "
            "transformers' convert_mistral_weights_to_hf.py"
        )
    for suffix, meaning in _FORMATS.items():
        if found := _first(names, suffix=suffix):
            return f"found {found}, {meaning}"
    if inner := _inner(folder, names):
        return f"found none here, but in {inner}; give that folder"
    return "found no weights; download or copy all of the model's files into this folder"


_FORMATS = {
    "adapter_model.safetensors": "an adapter without its base: register it as a variant of its base",
    ".gguf": (
        "a file for llama.cpp; download the model's original files, which are in safetensors format, from "
        "the repository that the GGUF was made from"
    ),
    ".bin": f"a pickle, which can run code when it is read; {SAVE}",
    ".pth": f"a pickle, which can run code when it is read; convert it for transformers, then {SAVE}",
    ".pt": f"a pickle, which can run code when it is read; convert it for transformers, then {SAVE}",
    ".safetensors": (
        "a name that transformers does not look for; if that file holds the whole model with transformers' "
        "names, rename it to model.safetensors"
    ),
    ".npz": "weights of MLX; register the model that they were converted from",
    ".msgpack": f"weights for Flax; {SAVE}",
    ".h5": f"weights for TensorFlow; {SAVE}",
    ".onnx": "a model for ONNX; register the model that it was exported from",
    ".incomplete": "a download that did not end; download the model again",
}


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry, _ in zip(folder.iterdir(), range(MAX_NAMES), strict=False))
    except OSError:
        return []


def _first(names: Iterable[str], *, prefix: str = "", suffix: str) -> str | None:
    return next((name for name in names if name.startswith(prefix) and name.endswith(suffix)), None)


def _inner(folder: Path, names: Sequence[str]) -> Path | None:
    """A folder in this one that looks like a checkpoint: a trainer's last, or one of the hub's cache."""
    for name in sorted(names, key=lambda name: (len(name), name), reverse=True):
        for inner in (folder / name, *_children(folder / name)):
            if (inner / "config.json").is_file() and any(inner.glob("model*.safetensors*")):
                return inner
    return None


def _children(folder: Path) -> list[Path]:
    return [folder / name for name in _names(folder)[:50]] if folder.is_dir() else []
