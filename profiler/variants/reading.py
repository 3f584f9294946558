"""Read a folder into a variant's manifest or spec, for every kind. Reads JSON and headers only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profiler.advice import download, quoted, register, register_variant
from profiler.errors import AdapterError, CheckpointError
from profiler.files import MAX_CONFIG_BYTES, is_file, read_json, shown
from profiler.missing_weights import MAX_NAMES
from profiler.model_files import CONFIG as MODEL_CONFIG
from profiler.types import ModelSpec
from profiler.variants import boft, lora, sparse, svd
from profiler.variants.delta import DELTA, open_delta
from profiler.variants.modules import require_adaptable
from profiler.variants.odd_names import CONFIG, MERGE, WEIGHTS, told_of
from profiler.variants.types import Manifest, VariantKind, VariantLimits, VariantSpec

# PEFT's kinds that put trained vectors before the prompt; merging adapters' weights does not include them.
UNMERGEABLE_TYPES = frozenset(
    {"PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "MULTITASK_PROMPT_TUNING", "ADAPTION_PROMPT", "CPT"}
)


def is_variant(folder: Path) -> bool:
    """Whether the folder holds an adapter or a delta, according to its files' names."""
    return is_file(folder / DELTA) or is_file(folder / CONFIG)


def read_variant(folder: Path, base: ModelSpec, limits: VariantLimits) -> VariantSpec:
    """The spec of the variant in `folder`, checked against `base`; raises as `read_manifest`."""
    return read_manifest(folder, base, limits).spec


def read_manifest(folder: Path, base: ModelSpec, limits: VariantLimits) -> Manifest:
    """Everything that a loader needs of the variant in `folder`, checked against `base`.

    Raises CheckpointError when files are missing, corrupt or incomplete; AdapterError when they are sound
    but do not fit the base or need what the engine lacks. Tensor data is not read: `verify_data` does that.
    """
    require_adaptable(base)
    has_delta, has_peft = is_file(folder / DELTA), is_file(folder / CONFIG)
    if has_delta and has_peft:
        raise CheckpointError(
            f"{folder} has both {DELTA} and {CONFIG}; keep only the file of the variant that you want"
        )
    if has_delta:
        delta = open_delta(folder, base)
        read = sparse.read if delta.kind is VariantKind.SPARSE_DELTA else svd.read
        return read(delta, base)
    if not has_peft:
        raise CheckpointError(_no_variant(folder))
    raw = read_json(folder / CONFIG, MAX_CONFIG_BYTES)
    try:
        return _read_adapter(folder, raw, base, limits)
    except AdapterError as error:
        raise AdapterError(told_of(folder, str(error), raw)) from error


def _read_adapter(folder: Path, raw: Mapping[str, Any], base: ModelSpec, limits: VariantLimits) -> Manifest:
    kind = raw.get("peft_type")
    if kind == "LORA":
        return lora.read(folder, base, limits)
    if kind == "BOFT":
        return boft.read(folder, base)
    if kind is None and "lora_parameters" in raw:
        fused, base_name = quoted(folder, "-fused"), raw.get("model")
        named = f', {shown(base_name)} by "model" in {CONFIG}' if base_name else ""
        raise AdapterError(
            f"{CONFIG}: this is an adapter of MLX, which is not served; on a Mac, fuse it into its base: "
            f"`pip install mlx-lm`, `python -m mlx_lm fuse --model BASE --adapter-path {quoted(folder)} "
            f"--save-path {fused} --de-quantize` (BASE is the model that the adapter was trained on{named}), "
            f"then register the result here: `ostinato register NAME {fused}`"
        )
    if isinstance(kind, str) and kind in UNMERGEABLE_TYPES:
        raise AdapterError(
            f"{CONFIG}: expected peft_type LORA or BOFT, got {kind}, which trains a prefix of the prompt and "
            "no weights, so it cannot be merged either; train a LoRA adapter, or choose another adapter"
        )
    raise AdapterError(
        f"{CONFIG}: expected peft_type LORA or BOFT, got {shown(kind)}, which is not served; {MERGE}"
    )


def _no_variant(folder: Path) -> str:
    """The message for a folder without a variant: what it holds, and what to do."""
    expected = f"expected {CONFIG} (a PEFT adapter) or {DELTA} (a compressed delta) in {folder}"
    inner = next((f for f in _folders(folder) if is_file(f / CONFIG) or is_file(f / DELTA)), None)
    if inner is not None:
        found = f"found it in its folder {inner.name}"
        return f"{expected}, {found}; register that folder: {register_variant(inner)}"
    if is_file(folder / MODEL_CONFIG):
        return (
            f"{expected}, found {MODEL_CONFIG}, so this is a whole model; register it as a base, "
            f"{register(folder)}, or as a fine-tune of BASE, which Ostinato compresses to a variant, "
            f"{register(folder, options=' --base BASE')}"
        )
    if is_file(folder / WEIGHTS):
        return (
            f"{expected}, found only {WEIGHTS}; copy {CONFIG} there, which the trainer wrote into the same "
            f"folder, or download it with {download(folder, CONFIG, of_adapter=True)}"
        )
    return (
        f"{expected}, found neither; copy the whole folder that the trainer wrote, or run "
        f"{download(folder, of_adapter=True)}"
    )


def _folders(folder: Path) -> list[Path]:
    """The folders in it, the last checkpoint first."""
    try:
        found = [path for path, _ in zip(folder.iterdir(), range(MAX_NAMES), strict=False) if path.is_dir()]
    except OSError:
        return []
    return sorted(found, key=lambda path: (len(path.name), path.name), reverse=True)
