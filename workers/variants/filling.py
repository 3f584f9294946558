"""Weights that a kind builds from its tensors: files are read, then verified while weights are built from
them.

No request uses a variant before all of this is done and the files are valid.

One thread verifies a file with a checksum. This takes as long as building a delta's layer; its embedding and
head, half a gigabyte, are in one file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from profiler.errors import CheckpointError
from workers.kernels.types import ALIGNMENT, aligned, views
from workers.variants.layer_weights import LayerWeights
from workers.variants.loader_threads import Job
from workers.variants.tensors import Buffers, Holding, Memory

Placed = tuple[LayerWeights, torch.Tensor]  # weights and their part of the variant's memory: uint8 [bytes]


def jobs(placed: Iterable[Placed], buffers: Buffers) -> list[Job]:
    """The jobs that fill all weights. A job raises ValueError if a file is invalid or does not fit its
    layer.
    """
    return [_Filling(files, own, buffers).read for files, own in _by_files(placed)]


class _Filling:
    """Some files, and the weights that are built from these files alone."""

    def __init__(self, files: Sequence[Holding], placed: Sequence[Placed], buffers: Buffers) -> None:
        self._files = files
        self._placed = placed
        self._buffers = buffers
        self._lock = threading.Lock()
        self._taken: Memory | None = None
        self._left = 0
        self._errors: list[Exception] = []

    def read(self) -> Sequence[Job]:
        """Read the files; returns the jobs that follow, which may run in any order and at the same time."""
        self._taken = memory = self._buffers.take(sum(ALIGNMENT + each.size_bytes for each in self._files))
        at = 0
        for each in self._files:
            each.read(memory[at : at + each.size_bytes])
            at += aligned(each.size_bytes)
        work: list[Callable[[], None]] = [each.verify for each in self._files]
        work += [partial(self._fill, weights, into) for weights, into in self._placed]
        self._left = len(work)
        return [partial(self._do, each) for each in work]

    def _fill(self, weights: LayerWeights, into: torch.Tensor) -> None:
        try:
            weights.fill(views(into, weights.parts, 0))
        except ValueError as e:
            raise ValueError(f"{weights.layer}: {e}") from e

    def _do(self, work: Callable[[], None]) -> None:
        """Do one job; the last job raises the error, preferably that of an invalid file over its
        consequences.
        """
        try:
            work()
        except Exception as e:
            self._errors.append(e)
        with self._lock:
            self._left -= 1
            if self._left:
                return
        for each in self._files:
            each.drop()
        self._give_back()
        errors, self._errors = self._errors, []  # an error holds its frames, which hold this list
        if errors:
            raise min(errors, key=lambda error: not isinstance(error, CheckpointError))

    def _give_back(self) -> None:
        assert self._taken is not None
        self._buffers.give(self._taken)
        self._taken = None


def _by_files(placed: Iterable[Placed]) -> list[tuple[tuple[Holding, ...], list[Placed]]]:
    """Independent groups: some files, and the weights that are built from these files alone.

    If weights share memory, only the first are included. The largest group comes first, so that none remains
    at the end.
    """
    groups: dict[int, tuple[tuple[Holding, ...], list[Placed]]] = {}
    group_of: dict[Holding, int] = {}
    filled: set[str] = set()
    for number, (weights, into) in enumerate(placed):
        if weights.source in filled:
            continue
        filled.update([weights.source] if weights.source else ())
        joined = [groups.pop(n) for n in sorted({group_of[f] for f in weights.files if f in group_of})]
        files = tuple(dict.fromkeys([*(f for group in joined for f in group[0]), *weights.files]))
        own = [*(entry for group in joined for entry in group[1]), (weights, into)]
        groups[number] = files, own
        group_of.update(dict.fromkeys(files, number))
    return sorted(groups.values(), key=lambda group: -sum(file.size_bytes for file in group[0]))
