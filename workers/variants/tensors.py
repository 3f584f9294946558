"""Tensors of a variant's files, verified before any other code uses them.

A file with a checksum is read whole. A file without one (PEFT's, one for all layers) is read in parts, the
tensors of each layer separately, so that several threads read it. Matrices that are only copied are read in
longer stretches (`copies.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from profiler.types import TensorRef
from profiler.variants.types import FileRef, Manifest
from profiler.variants.verifying import (
    check_digest,
    check_finite,
    check_values,
    read_stretches,
    read_unverified,
    stretches_bytes,
    tensors_of,
)
from workers.variants.pages import whole_pages

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
    "I8": torch.int8,
}
EVERYTHING = slice(None)
KEPT_BYTES = 24 << 20  # of a buffer that is kept for the next variant: a share of an adapter's file

Memory = npt.NDArray[np.uint8]


class Holding(Protocol):
    """Some bytes of a variant's files that are read together; its tensors are valid until it is dropped."""

    @property
    def size_bytes(self) -> int: ...

    def read(self, memory: Memory) -> None:
        """Read into `memory` [size_bytes]. Raises CheckpointError if the size is not the expected one."""

    def verify(self) -> None:
        """Verify the bytes that were read. Raises CheckpointError if they are invalid."""

    def drop(self) -> None:
        """Forget the memory, which will hold other data."""


@dataclass(eq=False)
class File:
    """A whole file, since its checksum covers the whole file."""

    folder: Path
    ref: FileRef
    tensors: list[TensorRef] = field(default_factory=list)
    data: dict[int, Memory] = field(default_factory=dict)  # of tensors that were read, by their offsets
    contents: memoryview | None = None

    @property
    def size_bytes(self) -> int:
        return self.ref.size_bytes

    def read(self, memory: Memory) -> None:
        self.contents = memory.data
        read_unverified(self.folder, self.ref, self.contents)
        self.data.update({t.offset: memory[t.offset : t.offset + t.size_bytes] for t in self.tensors})

    def verify(self) -> None:
        assert self.contents is not None
        check_digest(self.folder, self.ref, self.contents)
        check_finite(self.contents, self.tensors, self.folder)

    def drop(self) -> None:
        self.data.clear()
        self.contents = None


@dataclass(frozen=True, eq=False)
class SomeTensors:
    """Some tensors of a file without a checksum; other tensors of the file are read at the same time."""

    file: File
    refs: tuple[TensorRef, ...]

    @property
    def size_bytes(self) -> int:
        return stretches_bytes(self.refs)

    def read(self, memory: Memory) -> None:
        for ref, start in read_stretches(self.file.folder, self.file.ref, self.refs, memory.data).items():
            self.file.data[ref.offset] = memory[start : start + ref.size_bytes]

    def verify(self) -> None:
        for ref in self.refs:
            check_values(self.file.data[ref.offset].data, ref, self.file.folder)

    def drop(self) -> None:
        for ref in self.refs:
            self.file.data.pop(ref.offset, None)


class Files:
    """The files of one variant, by name. `filling` reads them."""

    def __init__(self, manifest: Manifest) -> None:
        self._files = {ref.name: File(manifest.folder, ref) for ref in manifest.files}
        for tensor in tensors_of(manifest):
            self._files[tensor.file].tensors.append(tensor)

    def holding(self, refs: Iterable[TensorRef]) -> tuple[Holding, ...]:
        """The holdings to read for these tensors; no other caller may ask for the same tensors at the same
        time.
        """
        by_file: dict[str, dict[int, TensorRef]] = {}
        for ref in refs:
            by_file.setdefault(ref.file, {})[ref.offset] = ref
        return tuple(self._held(self._files[name], tuple(own.values())) for name, own in by_file.items())

    def file_of(self, ref: TensorRef) -> File:
        return self._files[ref.file]

    def _held(self, file: File, refs: tuple[TensorRef, ...]) -> Holding:
        whole = file.ref.sha256 is not None or file.ref.compressed is not None
        return file if whole else SomeTensors(file, refs)

    def read(self, ref: TensorRef, rows: slice = EVERYTHING, columns: slice = EVERYTHING) -> torch.Tensor:
        """Rows (first dimension) and columns (last) of a tensor that was read.

        The caller must neither write to the result nor keep it: for whole rows it is the memory of the file.
        """
        data = self._files[ref.file].data.get(ref.offset)
        if data is None:
            raise RuntimeError(f"{ref.name} was used before it was read")
        raw = torch.from_numpy(data)
        picked = raw.view(DTYPES[ref.dtype]).view(ref.shape)[rows]
        return (picked[..., columns] if len(ref.shape) > 1 else picked).contiguous()


class Buffers:
    """Memory that files are read into, and that is reused: new memory costs as much as reading.
    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Memory] = []

    def take(self, size: int) -> Memory:
        """Take a buffer of `size` bytes or more."""
        with self._lock:
            fitting = (number for number, memory in enumerate(self._free) if len(memory) >= size)
            if (number := next(fitting, None)) is not None:
                return self._free.pop(number)
            if self._free:
                self._free.pop()  # a larger buffer replaces it
        return whole_pages(size)

    def give(self, memory: Memory) -> None:
        """Give a buffer back."""
        with self._lock:
            self._free.append(memory)

    def trim(self, count: int) -> None:
        """Keep at most `count` buffers for the next variant, and no large buffer."""
        with self._lock:
            self._free = [memory for memory in self._free if len(memory) <= KEPT_BYTES][:count]

    @contextmanager
    def borrowed(self, size: int) -> Iterator[Memory]:
        memory = self.take(size)
        yield memory[:size]
        self.give(memory)
