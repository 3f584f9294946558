"""Tensors from bytes on disk, one at a time."""

from __future__ import annotations

from pathlib import Path

import torch

from profiler.errors import CheckpointError
from profiler.types import TensorRef

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip


def as_tensor(data: memoryview, ref: TensorRef, start: int = 0) -> torch.Tensor:
    """The tensor, sharing memory with `data`, whose first byte is byte `start` of its file."""
    if not ref.size_bytes:
        return torch.empty(ref.shape, dtype=DTYPES[ref.dtype])
    piece = data[ref.offset - start : ref.offset - start + ref.size_bytes]
    return torch.frombuffer(piece, dtype=DTYPES[ref.dtype]).view(ref.shape)


def read_bytes(folder: Path, ref: TensorRef) -> memoryview:
    """The bytes of one tensor. Raises CheckpointError if the file has changed meanwhile."""
    data = bytearray(ref.size_bytes)
    try:
        with (folder / ref.file).open("rb") as file:
            file.seek(ref.offset)
            got = file.readinto(data)
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / ref.file}: {error.strerror}; copy it again") from error
    if got != ref.size_bytes:
        raise CheckpointError(f"{folder / ref.file} ends within {ref.name}; copy it again")
    return memoryview(data)


def read_tensor(folder: Path, ref: TensorRef) -> torch.Tensor:
    """One tensor in its own memory. Raises CheckpointError."""
    return as_tensor(read_bytes(folder, ref), ref, ref.offset)
