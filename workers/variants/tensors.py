"""Parts of tensors in safetensors files, by the places a manifest names. Only what is asked for is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from profiler.types import TensorRef

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
}
EVERYTHING = slice(None)


def read(folder: Path, ref: TensorRef, rows: slice = EVERYTHING, columns: slice = EVERYTHING) -> torch.Tensor:
    """Rows (first dimension) and columns (last) of a tensor, as a copy. Raises ValueError."""
    whole = mapped(folder, ref)
    picked = whole[rows]
    return (picked[..., columns] if whole.ndim > 1 else picked).clone()


def mapped(folder: Path, ref: TensorRef) -> torch.Tensor:
    """A tensor backed by its file; never write to it."""
    path = folder / ref.file
    try:
        data = np.memmap(path, np.uint8, "c", offset=ref.offset, shape=(ref.size_bytes,))
    except (OSError, ValueError) as e:
        raise ValueError(f"cannot read {ref.name} from {path}: {e}") from e
    return torch.from_numpy(data).view(_DTYPES[ref.dtype]).view(ref.shape)
