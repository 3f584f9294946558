"""Means over seeds, with intervals that hold the expected value 95 times out of 100 (Student's t)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

CONFIDENCE = 0.95


def mean_of(values: Sequence[float]) -> dict[str, float | None]:
    """The mean of normally distributed values; a single value has no interval."""
    count, mean = len(values), math.fsum(values) / len(values)
    if count == 1:
        return {"mean": mean, "low": None, "high": None}
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = _quantile(count - 1) * math.sqrt(variance / count)
    return {"mean": mean, "low": mean - half, "high": mean + half}


def over_seeds(runs: Sequence[Any]) -> Any:
    """Merge documents of one form: each number becomes its mean and interval over the runs that have it."""
    first = runs[0]
    if isinstance(first, dict):
        names = [name for name in first if any(name in run for run in runs)]
        names += sorted({name for run in runs for name in run} - set(first))
        return {name: over_seeds([run[name] for run in runs if name in run]) for name in names}
    values = [float(value) for value in runs if value is not None]
    return mean_of(values) if values else None


def _quantile(freedom: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - (1 - CONFIDENCE) / 2))
