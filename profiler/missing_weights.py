"""What a folder holds instead of readable weights, and what its owner can do about it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from profiler import advice

MAX_NAMES = 2_000  # entries of a folder that are looked at
SHARD = re.compile(r"model-\d+-of-(\d+)\.safetensors")
INDEX = "model.safetensors.index.json"
VARIANT = re.compile(r"model\.\w{1,20}\.safetensors")


def no_weights(folder: Path) -> str:
    """The message for a folder without `model.safetensors` and without an index."""
    return (
        f"expected model.safetensors, or {INDEX} with the files that it names, in {folder}, "
        f"{_advice(folder, _names(folder))}"
    )


def no_config(folder: Path) -> str:
    """The message for a folder without `config.json`."""
    expected, names = f"expected a file config.json in {folder}, found none", _names(folder)
    variant = next((name for name in ("adapter_config.json", "delta.json") if name in names), None)
    if variant is not None:
        return (
            f"{expected}, but {variant}, so this is a variant; register its base first, then "
            f"{advice.register_variant(folder)}"
        )
    if inner := _inner(folder, names):
        return f"{expected}, but a model in {inner}; register that folder: {advice.register(inner)}"
    if found := _first(names, suffix=".gguf"):
        return f"{expected}, but {found}, {_gguf(folder, found)}"
    return f"{expected}; copy all of the model's files into this folder, or run {advice.download(folder)}"


def _advice(folder: Path, names: list[str]) -> str:
    """What was found, and what to do: the finding nearest to a checkpoint first."""
    if shards := [name for name in names if SHARD.fullmatch(name)]:
        return (
            f"found {shards[0]} but no index, which lists the model's files; copy {INDEX} from the folder "
            f"where the model was saved, or download it with {advice.download(folder, INDEX)}; if the index "
            "is lost, save the model again with save_pretrained"
        )
    if found := next((name for name in names if VARIANT.fullmatch(name)), None):
        wanted = VARIANT.sub(r"model.safetensors", found)
        return (
            f"found {found}, which transformers reads only with `variant=`; rename the file: "
            f"{advice.rename_file(folder, found, wanted)}"
        )
    if found := _first(names, prefix="consolidated", suffix=".safetensors"):
        return (
            f"found {found}, weights in Mistral's own layout, which Ostinato does not read; download the "
            f"same repository's files for transformers: {advice.download(folder)}"
        )
    for suffix, meaning in _FORMATS.items():
        if found := _first(names, suffix=suffix):
            return f"found {found}, {meaning(folder, found)}"
    if inner := _inner(folder, names):
        return f"found none here, but a model in {inner}; register that folder: {advice.register(inner)}"
    return (
        f"found no weights; copy all of the model's files into this folder, or run {advice.download(folder)}"
    )


def _adapter(folder: Path, found: str) -> str:
    return (
        "an adapter without its base; register the base first, then the adapter with "
        f"{advice.register_variant(folder)}"
    )


def _gguf(folder: Path, found: str) -> str:
    original = advice.download(folder.with_name(f"{folder.name}-original"))
    return (
        "a file for llama.cpp, which Ostinato does not read; the page of the GGUF on Hugging Face names the "
        f'original model ("Base model"): download the original with {original}'
    )


def _pickle(folder: Path, found: str) -> str:
    return (
        "a pickle, which Ostinato does not read because it can run code; if you trust it, write a copy in "
        f"safetensors format: {advice.save_again(folder)}"
    )


def _raw_pickle(folder: Path, found: str) -> str:
    return (
        "a pickle, which Ostinato does not read because it can run code; download the model's files for "
        f"transformers: {advice.download(folder.with_name(f'{folder.name}-original'))}, or save the model "
        "with save_pretrained where it was trained"
    )


def _odd_name(folder: Path, found: str) -> str:
    return (
        "a name that transformers does not look for; rename the file: "
        f"{advice.rename_file(folder, found, 'model.safetensors')}, and register the model again, which "
        "checks that the file holds the whole model; if it does not, download the missing files: "
        f"{advice.download(folder)}"
    )


def _other_library(folder: Path, found: str) -> str:
    return (
        "weights of another library, which Ostinato does not read; download the model's files for "
        f"transformers: {advice.download(folder.with_name(f'{folder.name}-original'))}"
    )


def _broken_off(folder: Path, found: str) -> str:
    return f"an unfinished download; run the download again: {advice.download(folder)}"


_FORMATS: dict[str, Callable[[Path, str], str]] = {
    "adapter_model.safetensors": _adapter,
    ".gguf": _gguf,
    ".bin": _pickle,
    ".pth": _raw_pickle,
    ".pt": _raw_pickle,
    ".safetensors": _odd_name,
    ".npz": _other_library,
    ".msgpack": _other_library,
    ".h5": _other_library,
    ".onnx": _other_library,
    ".incomplete": _broken_off,
}


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry, _ in zip(folder.iterdir(), range(MAX_NAMES), strict=False))
    except OSError:
        return []


def _first(names: Iterable[str], *, prefix: str = "", suffix: str) -> str | None:
    return next((name for name in names if name.startswith(prefix) and name.endswith(suffix)), None)


def _inner(folder: Path, names: Sequence[str]) -> Path | None:
    """A folder in this one that looks like a checkpoint: a trainer's last, or a snapshot in the hub's
    cache."""
    for name in sorted(names, key=lambda name: (len(name), name), reverse=True):
        for inner in (folder / name, *_children(folder / name)):
            if (inner / "config.json").is_file() and any(inner.glob("model*.safetensors*")):
                return inner
    return None


def _children(folder: Path) -> list[Path]:
    return [folder / name for name in _names(folder)[:50]] if folder.is_dir() else []
