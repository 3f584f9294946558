"""Which file of a Hugging Face checkpoint holds each tensor, and where in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from profiler import advice
from profiler.contents import SUFFIX
from profiler.errors import CheckpointError
from profiler.files import is_file, read_json, read_layout, shown
from profiler.missing_weights import no_weights
from profiler.types import TensorRef

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def locate(folder: Path) -> dict[str, TensorRef]:
    """Every tensor of the checkpoint, by name: all tensors in its weight files, as transformers reads them.

    Raises CheckpointError when files are missing or corrupt, or when two files hold a tensor of one name.
    """
    tensors: dict[str, TensorRef] = {}
    for file in weight_files(folder):
        for name, ref in locate_in(folder, file).items() if file != INDEX else ():
            if name in tensors:
                raise CheckpointError(
                    f"{folder}: {tensors[name].file} and {file} both have {name[:200]}: files of two models "
                    "are mixed; save the model again with save_pretrained into an empty folder, or download "
                    f"it into such a folder: {advice.download(folder.with_name(f'{folder.name}-new'))}"
                )
            tensors[name] = ref
    return tensors


def weight_files(folder: Path) -> tuple[str, ...]:
    """The names of the files with the model's weights; the shards' index, if there is one, comes first.

    `model.safetensors` is used if it exists, as transformers does, else the files that the index names.
    Other files with weights in the folder do not belong to the model. Raises CheckpointError.
    """
    single, shards = is_file(folder / SINGLE), index_shards(folder)
    missing = [name for name in shards if not is_file(folder / name)]
    if single and shards and shards != (SINGLE,) and len(missing) < len(shards):
        raise CheckpointError(
            f"{folder} has weights twice: in {SINGLE}, and in the files that {INDEX} names, such as "
            f"{shards[0]}; keep {SINGLE}, which transformers reads: {advice.set_aside(folder / INDEX)}; "
            "only if you saved the model again as shards (newer in `ls -l "
            f"{advice.quoted(folder)}`), keep the shards: {advice.set_aside(folder / SINGLE)}"
        )
    if single:
        return (SINGLE,)
    if not shards:
        raise CheckpointError(no_weights(folder))
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of the {len(shards)} files that {INDEX} names are missing, such as "
            f"{missing[0]}; copy the missing files from the folder where the model was saved, or download "
            f"them with {advice.download(folder)}"
        )
    return (INDEX, *shards)


def index_shards(folder: Path) -> tuple[str, ...]:
    """The files that the index names; none without an index."""
    where = folder / INDEX
    if not is_file(where):
        return ()
    weight_map = read_json(where).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{where}: expected weight_map to map tensor names to files; download the index again: "
            f"{advice.download(folder, INDEX)}"
        )
    return tuple(sorted({shard_name(name, where) for name in weight_map.values()}))


def locate_in(folder: Path, file: str, contents_bytes: int | None = None) -> dict[str, TensorRef]:
    """The tensors of one safetensors file of `folder`, by name. Raises CheckpointError.

    With `contents_bytes` the file is stored compressed, under its name plus `.zst`. `contents_bytes` is the
    size of its contents; the tensors' offsets are in the contents.
    """
    path = folder / (file if contents_bytes is None else f"{file}{SUFFIX}")
    tensors, data_start = read_layout(path, contents_bytes)
    return {
        name: TensorRef(file, name, info.dtype, info.shape, data_start + info.start, info.size_bytes)
        for name, info in tensors.items()
    }


def shard_name(name: Any, where: Path) -> str:
    """Check that the name is a plain file name: an index must not lead out of its folder."""
    if not isinstance(name, str) or not name.endswith(".safetensors") or "/" in name or "\\" in name:
        raise CheckpointError(
            f"{where}: expected names of safetensors files, got {shown(name)!r}; download the index again"
        )
    return name
