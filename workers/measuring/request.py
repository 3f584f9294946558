"""A whole profile to be measured on one node. Plain data, sent to a Ray task there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from profiler.profiling_plan import EngineRun


@dataclass(frozen=True)
class MeasureRequest:
    """Measure the fingerprints of the model in `folder` with the `engine_runs`.

    `known` are lines (profiler.measurements) that need not be measured again. Each of the node's `devices`
    (indices; the CPU is 0) may be filled with `device_bytes`, and everything ends after `seconds`.
    Measurements are also kept in `scratch`, on the node, where a repetition finds them. `holder` is on the
    command line of its processes: their memory counts as that holder's.
    """

    folder: Path
    scratch: Path
    engine_runs: tuple[EngineRun, ...]
    known: tuple[str, ...]
    device_kind: str
    devices: tuple[int, ...]
    device_bytes: int
    dtype: str
    max_model_len: int
    seconds: float
    holder: str = ""
