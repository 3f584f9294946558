"""The cost of a compression: bytes, errors, time."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from profiler.types import ModelSpec
from profiler.variants.delta import CODES, SCALES
from profiler.variants.types import VariantSpec
from workers.compression.layout import tables
from workers.compression.records import PartRecord, mean_errors

HALF_BYTES = 2  # of an uncompressed weight, as papers count


@dataclass(frozen=True)
class Result:
    """The result of a compression. `spec` is the variant in `folder`, None for a plain checkpoint.

    `size_bytes` are the stored bytes, of packed files their packed size; `table_bytes` is the part of
    embedding and head. `finetune_bytes` and `finetune_table_bytes` are the same for the fine-tune in 16 bits.
    `layer_errors` is equation 1's error relative to the base's, by kind of module, the mean over the layers:
    0 is the fine-tune, 1 the base. It is over calibration's inputs, or, without calibration, over inputs that
    are all equal.
    `seconds` counts a resumed job's earlier runs. Peaks are of this process.
    """

    folder: Path
    spec: VariantSpec | None
    size_bytes: int
    table_bytes: int
    finetune_bytes: int
    finetune_table_bytes: int
    layer_errors: Mapping[str, float]
    seconds: float
    peak_memory_bytes: int
    peak_device_bytes: int
    warnings: Sequence[str] = ()

    @property
    def ratio(self) -> float:
        """How many times smaller it is than the fine-tune in 16 bits."""
        return self.finetune_bytes / max(1, self.size_bytes)

    @property
    def ratio_without_tables(self) -> float:
        """The same ratio without embedding and head."""
        return (self.finetune_bytes - self.finetune_table_bytes) / max(1, self.size_bytes - self.table_bytes)

    def packed(self, saved_bytes: int, saved_table_bytes: int) -> Result:
        """The result after packing, which saved `saved_bytes` in all, and `saved_table_bytes` in the file
        with embedding and head.
        """
        return replace(
            self,
            size_bytes=max(0, self.size_bytes - saved_bytes),
            table_bytes=max(0, self.table_bytes - saved_table_bytes),
        )

    def as_json(self) -> dict[str, Any]:
        """Everything except what the folder itself contains."""
        found = asdict(self)
        del found["folder"], found["spec"]
        return found


def result_of(
    folder: Path,
    spec: VariantSpec | None,
    tuned: ModelSpec,
    records: Sequence[PartRecord],
    added_bytes: int,
    seconds: float,
    device: str,
) -> Result:
    """Sum up the records. `added_bytes` are of rows for tokens that the base does not have; torch computed on
    `device`.
    """
    held = tables(tuned)
    stored = (item for record in records for item in record.whole.items())
    table_bytes = sum(size for name, size in stored if _replaced(name) in held)
    table_values = sum(math.prod(shape) for name, shape in tuned.other_shapes.items() if name in held)
    return Result(
        folder=folder,
        spec=spec,
        size_bytes=sum(record.size_bytes for record in records) + added_bytes,
        table_bytes=table_bytes + added_bytes,
        finetune_bytes=HALF_BYTES * (tuned.weight_bytes // tuned.dtype_bytes),
        finetune_table_bytes=HALF_BYTES * table_values,
        layer_errors=mean_errors(records),
        seconds=seconds,
        peak_memory_bytes=_peak_memory_bytes(),
        peak_device_bytes=_peak_device_bytes(device),
    )


def _replaced(name: str) -> str:
    """The tensor that a stored tensor, or part of it, replaces."""
    return name.removesuffix(CODES).removesuffix(SCALES)


def _peak_device_bytes(device: str) -> int:
    """The peak memory of the GPU; 0 if torch computes in the process's own memory."""
    return torch.cuda.max_memory_allocated(device) if torch.device(device).type == "cuda" else 0


def _peak_memory_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
