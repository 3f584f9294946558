"""From a folder to a variant's manifest or spec, whatever its kind. Reads JSON and headers only."""

from __future__ import annotations

from pathlib import Path

from profiler.errors import AdapterError, CheckpointError
from profiler.files import MAX_CONFIG_BYTES, is_file, read_json, shown
from profiler.missing_weights import MAX_NAMES
from profiler.model_files import CONFIG as MODEL_CONFIG
from profiler.types import ModelSpec
from profiler.variants import boft, lora, sparse, svd
from profiler.variants.delta import DELTA, open_delta
from profiler.variants.modules import require_adaptable
from profiler.variants.odd_names import MERGE
from profiler.variants.peft import CONFIG, WEIGHTS
from profiler.variants.types import Manifest, VariantKind, VariantLimits, VariantSpec


def is_variant(folder: Path) -> bool:
    """Whether the folder holds an adapter or a delta, by its files' names."""
    return is_file(folder / DELTA) or is_file(folder / CONFIG)


def read_variant(folder: Path, base: ModelSpec, limits: VariantLimits) -> VariantSpec:
    """What is known of the variant in `folder` once it is checked against `base`; raises as below."""
    return read_manifest(folder, base, limits).spec


def read_manifest(folder: Path, base: ModelSpec, limits: VariantLimits) -> Manifest:
    """All that a loader needs of the variant in `folder`, checked against `base`.

    Raises CheckpointError when files are missing, corrupt or incomplete, AdapterError when they are sound
    but do not fit the base or need what the engine lacks. Tensor data is not read: `verify_data` does that.
    """
    require_adaptable(base)
    has_delta, has_peft = is_file(folder / DELTA), is_file(folder / CONFIG)
    if has_delta and has_peft:
        raise CheckpointError(f"{folder} holds both {DELTA} and {CONFIG}; keep the one that is meant")
    if has_delta:
        delta = open_delta(folder, base)
        read = sparse.read if delta.kind is VariantKind.SPARSE_DELTA else svd.read
        return read(delta, base)
    if not has_peft:
        raise CheckpointError(_no_variant(folder))
    raw = read_json(folder / CONFIG, MAX_CONFIG_BYTES)
    kind = raw.get("peft_type")
    if kind == "LORA":
        return lora.read(folder, base, limits)
    if kind == "BOFT":
        return boft.read(folder, base)
    if kind is None and "lora_parameters" in raw:
        raise AdapterError(
            f"{folder / CONFIG} is of an adapter of MLX; fuse it into its base with mlx_lm.fuse "
            "--de-quantize and register the result as a base"
        )
    raise AdapterError(f"{folder / CONFIG}: expected peft_type LORA or BOFT, got {shown(kind)}; {MERGE}")


def _no_variant(folder: Path) -> str:
    """The message for a folder that holds neither kind of variant: what it holds, and what to do."""
    expected = f"expected {CONFIG} (a PEFT adapter) or {DELTA} (a compressed delta) in {folder}"
    inner = next((f for f in _folders(folder) if is_file(f / CONFIG) or is_file(f / DELTA)), None)
    if inner is not None:
        return f"{expected}; found it in {inner.name}, a folder in there: give that folder"
    if is_file(folder / MODEL_CONFIG):
        return (
            f"{expected}; found {MODEL_CONFIG}, so this is a whole model: register it as a fine-tune "
            "(`ostinato register NAME FOLDER --base BASE`), which is compressed to a variant, or as a model "
            "of its own (`ostinato register NAME FOLDER`)"
        )
    if is_file(folder / WEIGHTS):
        return f"{expected}; found {WEIGHTS} alone: copy {CONFIG} there, which the trainer wrote beside it"
    return f"{expected}, found neither; copy the whole folder that the trainer wrote"


def _folders(folder: Path) -> list[Path]:
    """Those in it, the last checkpoint first."""
    try:
        found = [path for path, _ in zip(folder.iterdir(), range(MAX_NAMES), strict=False) if path.is_dir()]
    except OSError:
        return []
    return sorted(found, key=lambda path: (len(path.name), path.name), reverse=True)
