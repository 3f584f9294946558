"""Types of the inputs and outputs of every estimator of tables. Seconds and bytes; memory is summed over
all GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from profiler.errors import CheckpointError
from profiler.types import Interval

__all__ = [
    "Calibration",
    "EstimatorName",
    "Family",
    "Interval",
    "NotPredictable",
    "Prediction",
    "Query",
    "TableError",
    "TableEstimator",
]


class EstimatorName(StrEnum):
    OSTINATO = "ostinato"
    MAVERIQ = "maveriq"


class Calibration(StrEnum):
    """The use of truth: none, or the truth of other models for constants of the hardware."""

    NONE = "none"
    LEAVE_ONE_MODEL_OUT = "leave-one-model-out"


class TableError(CheckpointError):
    """A table that cannot be used. The message names the file, line and column and what was expected."""


class NotPredictable(ValueError):
    """The fingerprints are not enough for a query; the message names what is missing."""


@dataclass(frozen=True, order=True)
class Family:
    """A unit of fitting: one model in one number format. `dtype` is that of the weights."""

    model: str
    dtype: str
    int8_kv: bool

    def __str__(self) -> str:
        return f"{self.model} {self.format}"

    @property
    def format(self) -> str:
        return self.dtype + ("+int8kv" if self.int8_kv else "")


@dataclass(frozen=True, order=True)
class Query:
    """One static batch on one plan: every sequence generates `output_tokens` tokens."""

    family: Family
    tensor_parallel: int
    layers_per_stage: tuple[int, ...]
    output_tokens: int
    batch: int

    @property
    def layers(self) -> int:
        return sum(self.layers_per_stage)

    @property
    def pipeline_parallel(self) -> int:
        return len(self.layers_per_stage)

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel


@dataclass(frozen=True)
class Prediction:
    """`latency_s`: the batch from start to end. `memory_bytes`: over all GPUs; None if never measured."""

    latency_s: Interval
    memory_bytes: Interval | None


class TableEstimator(Protocol):
    """An estimator built from fingerprints; then a pure function of the query."""

    @property
    def name(self) -> str: ...

    def predict(self, query: Query) -> Prediction:
        """Predict a query. Raises NotPredictable."""
        ...
