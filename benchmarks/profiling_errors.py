"""How far the estimator, from fingerprints, is from plans that were measured whole; with a plot.

    python -m benchmarks.profiling_errors --fingerprints F.jsonl --truth T.jsonl --out ERRORS.json

Rows as `benchmarks.profiling` writes them. Errors are absolute and relative: medians and 90th percentiles
of TTFT, TPOT and each rank's memory beside its KV cache, over all and by batch.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.profiling.results import by_shape
from benchmarks.profiling.shapes import spec
from profiler.measurements import Footprint, Measurement, Timing
from profiler.physical.calibrating import calibrate
from profiler.physical.calibration import Calibration, Cut
from profiler.physical.memory import rank_bytes
from profiler.physical.pipeline import latency
from profiler.types import Plan, Workload


@dataclass(frozen=True)
class Error:
    """A figure of one plan: what was predicted and what was measured, in seconds or bytes."""

    shape: str
    figure: str
    plan: str
    batch: int
    predicted: float
    actual: float

    @property
    def relative(self) -> float:
        return abs(self.predicted / self.actual - 1)


def errors(name: str, fingerprints: Iterable[Measurement], truth: Iterable[Measurement]) -> Iterator[Error]:
    calibration = calibrate(spec(name), fingerprints)
    for measured in truth:
        if isinstance(measured, Timing):
            yield from _of_timing(name, calibration, measured)
        else:
            yield from _of_footprint(name, calibration, measured)


def _of_timing(name: str, calibration: Calibration, measured: Timing) -> Iterator[Error]:
    setting, point = measured.setting, measured.point
    work = Workload(point.batch, point.input_tokens, measured.output_tokens)
    found = latency(calibration, Cut.of(setting), setting.layers_per_stage, work)
    plan = f"tp{setting.tensor_parallel} {setting.layers_per_stage}"
    yield Error(name, "TTFT", plan, point.batch, found.ttft_s, measured.ttft_s)
    yield Error(name, "TPOT", plan, point.batch, found.tpot_s, measured.tpot_s)


def _of_footprint(name: str, calibration: Calibration, measured: Footprint) -> Iterator[Error]:
    setting = measured.setting
    plan = Plan(setting.tensor_parallel, setting.layers_per_stage, "none", 1, 0, 0, 0)
    label = f"tp{setting.tensor_parallel} {setting.layers_per_stage}"
    for found, actual in zip(rank_bytes(calibration, Cut.of(setting), plan), measured.ranks, strict=True):
        yield Error(name, "memory", label, 0, found.without_kv_cache, actual.without_kv_cache)


def summary(found: list[Error]) -> list[dict[str, Any]]:
    """Percent, by figure and shape, figure and batch, and figure."""
    groups: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
    for error in found:
        for shape, batch in ((error.shape, "all"), ("all", str(error.batch)), ("all", "all")):
            groups[error.figure, shape, batch].append(100 * error.relative)
    return [
        {
            "figure": figure,
            "shape": shape,
            "batch": batch,
            "count": len(values),
            "median_percent": round(float(np.median(values)), 2),
            "p90_percent": round(float(np.quantile(values, 0.9)), 2),
        }
        for (figure, shape, batch), values in sorted(groups.items())
    ]


def plot(found: list[Error], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figures = ("TTFT", "TPOT", "memory")
    drawing, axes = plt.subplots(1, len(figures), figsize=(13, 4.2))
    for axis, figure in zip(axes, figures, strict=True):
        for shape in sorted({error.shape for error in found}):
            mine = [e for e in found if e.figure == figure and e.shape == shape]
            axis.loglog([e.actual for e in mine], [e.predicted for e in mine], ".", alpha=0.6, label=shape)
        low, high = axis.get_xlim()
        axis.plot([low, high], [low, high], color="black", linewidth=0.8)
        axis.set(title=figure, xlabel="measured", ylabel="predicted")
    axes[0].legend(fontsize=8)
    drawing.tight_layout()
    drawing.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fingerprints", type=Path, required=True)
    parser.add_argument("--truth", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    fingerprints, truth = by_shape(given.fingerprints), by_shape(given.truth)
    found = [e for name in truth for e in errors(name, fingerprints[name], truth[name])]
    rows = summary(found)
    for row in rows:
        print(" ".join(str(value) for value in row.values()))
    files = f"--fingerprints {given.fingerprints.name} --truth {given.truth.name}"
    command = f"python -m benchmarks.profiling_errors {files} --out {given.out.name}"
    given.out.write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")
    plot(found, given.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
