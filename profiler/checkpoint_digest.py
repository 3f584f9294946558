"""A fingerprint of a checkpoint's content that costs a few small reads per tensor.

It is a SHA-256 over the architecture, every tensor's name, type and shape, and five windows of 64 bytes of
each tensor. File names, sharding and settings that do not change weights do not affect it. Training changes
nearly every weight, so the fingerprint shows when a delta was made on another checkpoint of the same shape.
It is no protection against deliberate forgery; the checksums of the files are for integrity.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

from profiler.errors import CheckpointError
from profiler.inside import open_file
from profiler.types import TensorRef

WINDOWS = 5
WINDOW_BYTES = 64


def fingerprint(folder: Path, facts: Mapping[str, Any], tensors: Mapping[str, TensorRef]) -> str:
    """64 hexadecimal digits for the checkpoint in `folder`. Raises CheckpointError if it cannot be read.

    `facts` are the checked numbers of its config, `tensors` the tensors that belong to the model.
    """
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    samples = _samples(folder, tensors)
    for name in sorted(tensors):
        ref = tensors[name]
        digest.update(json.dumps([name, ref.dtype, ref.shape]).encode())
        digest.update(samples[name])
    return digest.hexdigest()


def _samples(folder: Path, tensors: Mapping[str, TensorRef]) -> dict[str, bytes]:
    """Some bytes of every tensor; each file is opened once."""
    by_file: dict[str, list[TensorRef]] = {}
    for ref in tensors.values():
        by_file.setdefault(ref.file, []).append(ref)
    samples = {}
    for name, refs in by_file.items():
        try:
            with BufferedReader(open_file(folder / name)) as file:
                for ref in sorted(refs, key=lambda ref: ref.offset):
                    samples[ref.name] = b"".join(_windows(file, ref))
        except OSError as error:
            raise CheckpointError(
                f"cannot read {folder / name}: {error.strerror}; check its permissions"
            ) from error
    return samples


def _windows(file: Any, ref: TensorRef) -> Iterator[bytes]:
    last = max(0, ref.size_bytes - WINDOW_BYTES)
    for position in sorted({last * k // (WINDOWS - 1) for k in range(WINDOWS)}):
        file.seek(ref.offset + position)
        yield file.read(min(WINDOW_BYTES, ref.size_bytes))
