"""A folder from which an engine starts a fingerprint: config and tokenizer, without weights.

The engine generates the weights (vLLM's `--load-format dummy`): a layer's cost does not depend on their
values.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from profiler.checkpoint import has_own_head
from profiler.errors import CheckpointError
from profiler.files import is_file, read_json
from profiler.fingerprints.config import fingerprint_config
from profiler.model_files import CONFIG, SMALL_FILES
from profiler.weight_files import INDEX, SINGLE

MAX_FILE_BYTES = 64_000_000  # the largest tokenizers have about 35 MB


def write_fingerprint(folder: Path, target: Path, layers: int) -> Path:
    """Write the fingerprint of `layers` hidden layers of the checkpoint in `folder` to the new `target`.

    Returns `target`, which exists completely or not at all. Raises CheckpointError as `fingerprint_config`
    does, and when files cannot be read, are too large, or `target` cannot be created.
    """
    where = folder / CONFIG
    config = fingerprint_config(read_json(where), layers, where)
    if _holds_weights(folder) and has_own_head(folder):
        config["tie_word_embeddings"] = False  # without weights, only the config can tell the engine
    partial = target.with_name(f"{target.name}.partial")
    if target.exists():
        raise CheckpointError(
            f"the folder {target} exists already; remove it first, or choose another folder"
        )
    try:
        shutil.rmtree(partial, ignore_errors=True)  # left behind by a process that was killed
        partial.mkdir(parents=True)
        (partial / CONFIG).write_text(json.dumps(config, indent=1))
        for name in SMALL_FILES:
            _copy(folder / name, partial / name)
        partial.rename(target)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error.strerror}; check the disk") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _holds_weights(folder: Path) -> bool:
    """Whether the folder has weights; a folder with a config alone can be profiled, too."""
    return any(is_file(folder / name) for name in (INDEX, SINGLE))


def _copy(source: Path, target: Path) -> None:
    if not is_file(source):
        return
    size = source.stat().st_size
    if size > MAX_FILE_BYTES:
        raise CheckpointError(
            f"{source} has {size} bytes, more than the allowed {MAX_FILE_BYTES}; copy the model's own file "
            "there"
        )
    shutil.copyfile(source, target)
