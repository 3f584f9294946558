"""Whether two tensors of a checkpoint hold the same bytes; pieces are read up to the first difference."""

from __future__ import annotations

from io import BufferedReader
from pathlib import Path

from profiler.errors import CheckpointError
from profiler.inside import open_file
from profiler.types import TensorRef

PIECE_BYTES = 1 << 22


def equal(folder: Path, one: TensorRef, other: TensorRef) -> bool:
    """Whether two tensors have the same type, shape and bytes. Raises CheckpointError for unreadable
    files."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    try:
        with _at(folder, one) as left, _at(folder, other) as right:
            return all(
                left.read(min(PIECE_BYTES, one.size_bytes - start))
                == right.read(min(PIECE_BYTES, one.size_bytes - start))
                for start in range(0, one.size_bytes, PIECE_BYTES)
            )
    except OSError as error:
        raise CheckpointError(
            f"cannot read {one.name} or {other.name} in {folder}: {error.strerror}; check their permissions"
        ) from error


def _at(folder: Path, tensor: TensorRef) -> BufferedReader:
    file: BufferedReader = BufferedReader(open_file(folder / tensor.file))
    file.seek(tensor.offset)
    return file
