"""The tensors of a variant of any kind, read file by file and checked at the same time."""

from __future__ import annotations

import torch

from profiler.types import TensorRef
from profiler.variants.types import FileRef, Manifest
from profiler.variants.verifying import check_finite, read_file, tensors_of
from workers.deltas.tensors import as_tensor

FILES_HELD = 2


class VariantFiles:
    """Reads a variant's files whole, and keeps the last `FILES_HELD` of them."""

    def __init__(self, manifest: Manifest) -> None:
        self._folder = manifest.folder
        self._files: dict[str, FileRef] = {file.name: file for file in manifest.files}
        self._tensors = tuple(tensors_of(manifest))
        self._held: dict[str, memoryview] = {}

    def read(self, ref: TensorRef) -> torch.Tensor:
        """Read a tensor. Raises CheckpointError for a file that is corrupt or holds values that are not
        finite.
        """
        data = self._held.pop(ref.file, None)
        if data is None:
            while len(self._held) >= FILES_HELD:
                del self._held[next(iter(self._held))]
            data = read_file(self._folder, self._files[ref.file])
            check_finite(data, (t for t in self._tensors if t.file == ref.file), self._folder)
        self._held[ref.file] = data
        return as_tensor(data, ref)
