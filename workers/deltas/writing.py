"""A safetensors file written tensor by tensor, so that memory holds one tensor and not the file."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch

from profiler.files import DTYPE_BYTES

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.uint8: "U8", torch.int8: "I8",
}  # fmt: skip
CHUNK_BYTES = 64 << 20


class SafetensorsWriter:
    """Announce every tensor (dtype as safetensors names it, shape), then write each in that same order.

    Wide types come first, so that every tensor is aligned to its element. `order` has the order.
    """

    def __init__(self, path: Path, entries: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        self.order = sorted(entries, key=lambda name: -DTYPE_BYTES[entries[name][0]])
        self._sizes = [math.prod(entries[n][1]) * DTYPE_BYTES[entries[n][0]] for n in self.order]
        self._digest = hashlib.sha256()
        self._next = 0
        self.size_bytes = 0
        self._file = path.open("wb")
        self._put(_header(self.order, self._sizes, entries))

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is None and self._next != len(self.order):
            raise ValueError(f"expected {len(self.order)} tensors to be written, got {self._next}")

    @property
    def sha256(self) -> str:
        """The SHA-256 of all bytes written so far, in hexadecimal."""
        return self._digest.hexdigest()

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor. Raises ValueError for a tensor out of order or of another size than announced."""
        flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        self.write_bytes(name, flat.numpy().data)

    def write_bytes(self, name: str, data: memoryview) -> None:
        expected = self.order[self._next], self._sizes[self._next]
        if (name, len(data)) != expected:
            raise ValueError(f"expected {expected} (name, bytes) to be written next, got {name, len(data)}")
        for start in range(0, len(data), CHUNK_BYTES):
            self._put(data[start : start + CHUNK_BYTES])
        self._next += 1

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.size_bytes += len(data)


def _header(order: list[str], sizes: list[int], entries: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, size in zip(order, sizes, strict=True):
        dtype, shape = entries[name]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)  # the data starts at a multiple of 8, as readers that map it require
    return struct.pack("<Q", len(text)) + text
