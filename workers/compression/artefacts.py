"""What a job writes: a delta for engines to serve, or a plain checkpoint of compressed weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from profiler.variants.types import VariantSpec
from workers.compression.durable import Entry
from workers.compression.records import PartRecord
from workers.compression.types import Compressed, Problem


@dataclass(frozen=True)
class Stored:
    """A layer as an artefact stores it: tensors by their full names, what delta.json says of it, and the
    weight, float32 [out, in], that a reader of these tensors computes with."""

    tensors: Mapping[str, torch.Tensor]
    facts: Mapping[str, Any]
    weight: torch.Tensor


class Artefact(Protocol):
    """The folder that a job fills, file by file."""

    def file_name(self, part: int) -> str:
        """Of hidden layer `part`; the part after the last layer is the rest."""
        ...

    def store(self, problem: Problem, compressed: Compressed, dtype: torch.dtype) -> Stored:
        """A compressed layer; `dtype` is the checkpoint's. Raises ValueError for one without a code."""
        ...

    def restore(self, problem: Problem, facts: Mapping[str, Any], file: Path) -> torch.Tensor:
        """The weight that `store` gave, float32 [out, in], from the file that holds its tensors."""
        ...

    def unchanged(self, name: str, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """What is stored of a module's weight, under its tensor's name, that equals the base's."""
        ...

    def whole(self, name: str) -> Mapping[str, Entry]:
        """A tensor that is stored as it is, or nothing if it need not be."""
        ...

    def rest(self) -> Mapping[str, Entry]:
        """Everything outside the hidden layers that must be stored, under its own name."""
        ...

    def finish(self, folder: Path, records: Sequence[PartRecord], notes: Mapping[str, Any]) -> int:
        """Complete the folder, and say how many bytes it holds that no record speaks of; `notes` are for
        people. Raises CheckpointError if it cannot be read back."""
        ...

    def spec(self, folder: Path) -> VariantSpec | None:
        """What the folder holds, read back as a variant; None for a plain checkpoint."""
        ...


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all values are equal, in whatever types."""
    return torch.equal(a, b) if a.dtype == b.dtype else torch.equal(a.float(), b.float())
