"""Tensors of a variant's files. A file is read whole and verified before anyone sees a tensor of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from profiler.types import TensorRef
from profiler.variants.types import FileRef, Manifest
from profiler.variants.verifying import check_finite, read_file, tensors_of

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
}
EVERYTHING = slice(None)

Memory = npt.NDArray[np.uint8]


@dataclass(eq=False)
class File:
    """One file, whose tensors are there while it is loaded."""

    folder: Path
    ref: FileRef
    tensors: list[TensorRef] = field(default_factory=list)
    data: Memory | None = None

    @property
    def size_bytes(self) -> int:
        return self.ref.size_bytes

    def load(self, memory: Memory) -> None:
        """Read into `memory` [size_bytes], verified. Raises CheckpointError when it is not sound."""
        check_finite(read_file(self.folder, self.ref, memory.data), self.tensors, self.folder)
        self.data = memory

    def drop(self) -> None:
        """Its memory will hold something else."""
        self.data = None


class Files:
    """Those of one variant, by name. Loading is another's business (`loaded`)."""

    def __init__(self, manifest: Manifest) -> None:
        self._files = {ref.name: File(manifest.folder, ref) for ref in manifest.files}
        for tensor in tensors_of(manifest):
            self._files[tensor.file].tensors.append(tensor)

    def holding(self, refs: Iterable[TensorRef]) -> tuple[File, ...]:
        """The files these tensors lie in."""
        return tuple(self._files[name] for name in dict.fromkeys(ref.file for ref in refs))

    def read(self, ref: TensorRef, rows: slice = EVERYTHING, columns: slice = EVERYTHING) -> torch.Tensor:
        """Rows (first dimension) and columns (last) of a tensor of a file that is loaded.

        Not to be written to, nor kept: where all of a row is asked for it is the file's own memory.
        """
        data = self._files[ref.file].data
        if data is None:
            raise RuntimeError(f"{ref.name} was asked for while {ref.file} was not loaded")
        raw = torch.from_numpy(data[ref.offset : ref.offset + ref.size_bytes])
        picked = raw.view(_DTYPES[ref.dtype]).view(ref.shape)[rows]
        return (picked[..., columns] if len(ref.shape) > 1 else picked).contiguous()


class Buffers:
    """Memory that files are read into, used again: fresh memory costs as much as reading. For threads."""

    def __init__(self) -> None:
        self._free: list[Memory] = []

    @contextmanager
    def borrowed(self, size: int) -> Iterator[Memory]:
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.empty(size, np.uint8)
        if len(memory) < size:
            memory = np.empty(size, np.uint8)
        yield memory[:size]
        self._free.append(memory)


@contextmanager
def loaded(files: Sequence[File], buffers: Buffers) -> Iterator[None]:
    """Within, the tensors of these files are there. Raises CheckpointError when a file is not sound."""
    with buffers.borrowed(sum(file.size_bytes for file in files)) as memory:
        try:
            at = 0
            for file in files:
                file.load(memory[at : at + file.size_bytes])
                at += file.size_bytes
            yield
        finally:
            for file in files:
                file.drop()
