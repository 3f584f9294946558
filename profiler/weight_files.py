"""Which file of a Hugging Face checkpoint holds which tensor, and where in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from profiler.contents import SUFFIX
from profiler.errors import CheckpointError
from profiler.files import is_file, read_json, read_layout, shown
from profiler.types import TensorRef

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def locate(folder: Path) -> dict[str, TensorRef]:
    """Every tensor of the checkpoint, by name. A shard index is followed where there is one.

    Raises CheckpointError when files are missing, corrupt or unlike their index.
    """
    if is_file(folder / INDEX):
        return _shards(folder)
    if is_file(folder / SINGLE):
        return locate_in(folder, SINGLE)
    raise CheckpointError(
        f"expected {SINGLE} or {INDEX} in {folder}, found neither; "
        "convert other formats (.bin, .pth, .gguf) with save_pretrained(safe_serialization=True)"
    )


def locate_in(folder: Path, file: str, contents_bytes: int | None = None) -> dict[str, TensorRef]:
    """The tensors of one safetensors file of `folder`, by name. Raises CheckpointError.

    With `contents_bytes` the file is stored compressed, under its name and `.zst`, and that is the size of
    its contents; the tensors' offsets are in the contents.
    """
    path = folder / (file if contents_bytes is None else f"{file}{SUFFIX}")
    tensors, data_start = read_layout(path, contents_bytes)
    return {
        name: TensorRef(file, name, info.dtype, info.shape, data_start + info.start, info.size_bytes)
        for name, info in tensors.items()
    }


def _shards(folder: Path) -> dict[str, TensorRef]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX}: expected weight_map to map tensor names to files")
    tensors: dict[str, TensorRef] = {}
    for shard in sorted({shard_name(name, folder / INDEX) for name in weight_map.values()}):
        for name, ref in locate_in(folder, shard).items():
            if weight_map.get(name) != shard:
                raise CheckpointError(f"{folder / shard} holds {name[:200]!r}, unlike its index")
            tensors[name] = ref
    none_missing(set(weight_map), set(tensors), folder)
    return tensors


def shard_name(name: Any, where: Path) -> str:
    """Only plain file names: an index must not lead out of its folder."""
    if not isinstance(name, str) or not name.endswith(".safetensors") or "/" in name or "\\" in name:
        raise CheckpointError(f"{where}: {shown(name)!r} is not the name of a safetensors file")
    return name


def none_missing(expected: set[str], present: set[str], folder: Path) -> None:
    missing = sorted(expected - present)
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(expected)} expected tensors are missing in {folder}, "
            f"such as {', '.join(missing)[:300]}; copy every shard, or correct config.json"
        )
