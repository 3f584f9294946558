"""A job's records of each finished part (a hidden layer, or the rest), as JSON, so that the job can
continue.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from profiler.variants.types import FileRef


@dataclass(frozen=True)
class ModuleRecord:
    """One compressed linear layer: its facts for delta.json, its bytes, and equation 1's relative error.

    `error` is None if it has no finite value: no input of calibration distinguishes the fine-tune from its
    base.
    """

    facts: Mapping[str, Any]
    size_bytes: int
    error: float | None


@dataclass(frozen=True)
class PartRecord:
    """One finished part. `file` is None if nothing had to be stored.

    `modules` and `whole` are keyed by full names. `whole` has the bytes of each tensor that was stored
    uncompressed, or as a difference of two parts.
    """

    file: FileRef | None
    modules: Mapping[str, ModuleRecord]
    whole: Mapping[str, int]
    seconds: float

    @property
    def size_bytes(self) -> int:
        return sum(m.size_bytes for m in self.modules.values()) + sum(self.whole.values())

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def part_record(raw: Mapping[str, Any]) -> PartRecord:
    """The inverse of `PartRecord.as_json`. Raises KeyError or TypeError for anything else."""
    file = None if raw["file"] is None else FileRef(**raw["file"])
    modules = {name: ModuleRecord(**entry) for name, entry in raw["modules"].items()}
    return PartRecord(file, modules, dict(raw["whole"]), raw["seconds"])


def finite(error: float) -> float | None:
    return error if math.isfinite(error) else None


def mean_errors(records: Sequence[PartRecord]) -> dict[str, float]:
    """The mean relative error of each kind of module (`q_proj`), in the order of their first occurrence."""
    found: dict[str, list[float]] = {}
    for record in records:
        for name, module in record.modules.items():
            if module.error is not None:
                found.setdefault(name.rpartition(".")[2], []).append(module.error)
    return {kind: math.fsum(errors) / len(errors) for kind, errors in found.items()}
