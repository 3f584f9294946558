"""Files that exist as a whole or not at all, whenever the process or the machine stops."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from profiler.variants.types import FileRef
from workers.deltas.folders import sync
from workers.deltas.writing import NAMES, SafetensorsWriter

PARTIAL = ".partial"


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: read only when its turn comes, so that memory holds one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    @property
    def size_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def held(tensor: torch.Tensor) -> Entry:
    """An entry for a tensor that is already in memory."""
    return Entry(tensor.dtype, tuple(tensor.shape), lambda: tensor)


def write_tensors(path: Path, entries: Mapping[str, Entry]) -> FileRef:
    """Write a safetensors file. Raises OSError."""
    partial = path.with_name(path.name + PARTIAL)
    announced = {name: (NAMES[entry.dtype], entry.shape) for name, entry in entries.items()}
    with SafetensorsWriter(partial, announced) as writer:
        for name in writer.order:
            writer.write(name, entries[name].read())
    _publish(partial, path)
    return FileRef(path.name, writer.size_bytes, writer.sha256)


def write_json(path: Path, document: Mapping[str, Any], indent: int | None = None) -> None:
    """Write a JSON document. Raises OSError."""
    write_bytes(path, json.dumps(document, indent=indent).encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file of bytes. Raises OSError."""
    partial = path.with_name(path.name + PARTIAL)
    partial.write_bytes(data)
    _publish(partial, path)


def rename(source: Path, target: Path) -> None:
    """Give a folder its final name. Raises OSError."""
    os.replace(source, target)
    sync(target.parent)


def _publish(partial: Path, path: Path) -> None:
    sync(partial)
    os.replace(partial, path)
    sync(path.parent)
