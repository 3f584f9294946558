"""The output of a job: a delta for engines to serve, or a plain checkpoint of compressed weights."""

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
    """A layer as an artefact stores it.

    `tensors` have their full names, `facts` go into delta.json, and `weight`, float32 [out, in], is what a
    reader of these tensors computes with.
    """

    tensors: Mapping[str, torch.Tensor]
    facts: Mapping[str, Any]
    weight: torch.Tensor


class Artefact(Protocol):
    """The folder that a job fills, file by file."""

    def file_name(self, part: int) -> str:
        """The file of hidden layer `part`; the part after the last layer holds the remaining tensors."""
        ...

    def store(self, problem: Problem, compressed: Compressed, dtype: torch.dtype) -> Stored:
        """Store a compressed layer; `dtype` is the checkpoint's. Raises ValueError if it has no code."""
        ...

    def restore(self, problem: Problem, facts: Mapping[str, Any], file: Path) -> torch.Tensor:
        """The weight of `store`, float32 [out, in], read from the file that holds its tensors."""
        ...

    def unchanged(self, name: str, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The stored tensors of a module whose weight equals the base's, by name."""
        ...

    def whole(self, name: str) -> Mapping[str, Entry]:
        """A tensor that is stored uncompressed; empty if it need not be stored."""
        ...

    def rest(self) -> Mapping[str, Entry]:
        """Everything outside the hidden layers that must be stored, under its own name."""
        ...

    def finish(self, folder: Path, records: Sequence[PartRecord], notes: Mapping[str, Any]) -> int:
        """Complete the folder; returns the number of its bytes that no record counts.

        `notes` are for people. Raises CheckpointError if the folder cannot be read back.
        """
        ...

    def spec(self, folder: Path) -> VariantSpec | None:
        """The folder, read back as a variant; None for a plain checkpoint."""
        ...


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all values are equal, whatever their types."""
    return torch.equal(a, b) if a.dtype == b.dtype else torch.equal(a.float(), b.float())
