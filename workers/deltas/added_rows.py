"""The rows of a delta for tokens that its base does not have (docs/formats.md, "Added rows")."""

from __future__ import annotations

from pathlib import Path

import torch

from profiler.errors import CheckpointError
from profiler.files import is_file, read_json, shown
from profiler.types import ModelSpec
from profiler.variants.delta import ADDED_ROWS, DELTA
from profiler.variants.types import FileRef
from profiler.variants.verifying import check_finite, read_file
from profiler.weight_files import locate_in, shard_name
from workers.deltas.tensors import as_tensor


def read_added_rows(variant: Path, base: ModelSpec) -> dict[str, torch.Tensor]:
    """[added, hidden] for the embedding and the head, by their names; empty for a variant without added rows.

    For a fine-tune with a tied head both are the same. Raises CheckpointError if they are missing, corrupt,
    or of another width.
    """
    raw = read_json(variant / DELTA).get(ADDED_ROWS) if is_file(variant / DELTA) else None
    if raw is None:
        return {}
    try:
        file = FileRef(shard_name(raw["file"], variant / DELTA), int(raw["size_bytes"]), str(raw["sha256"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{variant / DELTA}: expected {ADDED_ROWS} to have file, size_bytes and sha256, got {shown(raw)}"
        ) from error
    data, places = read_file(variant, file), locate_in(variant, file.name)
    check_finite(data, places.values(), variant)
    rows = {name: as_tensor(data, place) for name, place in places.items()}
    if base.embedding not in rows or any(t.shape[1:] != (base.hidden_size,) for t in rows.values()):
        raise CheckpointError(
            f"{variant / file.name}: expected rows of {base.hidden_size} values for {base.embedding}, got "
            f"{ {name: tuple(t.shape) for name, t in rows.items()} }; copy it again"
        )
    return {base.head: rows[base.embedding], **rows}
