"""From a folder to a variant's manifest or spec, whatever its kind. Reads JSON and headers only."""

from __future__ import annotations

from pathlib import Path

from profiler.errors import AdapterError, CheckpointError
from profiler.files import MAX_CONFIG_BYTES, is_file, read_json, shown
from profiler.types import ModelSpec
from profiler.variants import boft, lora, sparse, svd
from profiler.variants.delta import DELTA, open_delta
from profiler.variants.modules import require_adaptable
from profiler.variants.peft import CONFIG
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
        raise CheckpointError(
            f"expected {CONFIG} (a PEFT adapter) or {DELTA} (a compressed delta) in {folder}, found neither; "
            "copy the whole folder"
        )
    kind = read_json(folder / CONFIG, MAX_CONFIG_BYTES).get("peft_type")
    if kind == "LORA":
        return lora.read(folder, base, limits)
    if kind == "BOFT":
        return boft.read(folder, base)
    raise AdapterError(f"{folder / CONFIG}: expected peft_type LORA or BOFT, got {shown(kind)}")
