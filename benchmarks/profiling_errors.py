"""The distance between the estimator, from fingerprints, and plans that were measured whole.

    python -m benchmarks.profiling_errors --fingerprints F.jsonl --truth T.jsonl --out ERRORS.json

Rows are as `benchmarks.profiling` writes them; runs that they cannot predict are listed. Errors are absolute
and relative: medians and 90th percentiles of TTFT, TPOT and each rank's memory outside its KV cache, over all
and by batch; and how often the intervals hold, which should be nine times in ten.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import plot_style, rehearsing
from benchmarks.profiling.cost import compared
from benchmarks.profiling.results import by_shape, merged
from benchmarks.profiling.shapes import spec
from benchmarks.profiling.tasks import Kind
from profiler.measurements import Footprint, Measurement, Setting, Timing
from profiler.physical.calibrating import calibrate
from profiler.physical.calibration import Calibration, Cut
from profiler.physical.memory import known_ranks
from profiler.predicting.predict import Ground, predict
from profiler.types import DeviceRates, Interval, Plan, Workload

FIGURES = ("TTFT", "TPOT", "memory")
REHEARSED = "llama-2-7b"
GIB = 2**30


@dataclass(frozen=True)
class Error:
    """A figure of one plan: what was predicted and what was measured, in seconds or bytes."""

    shape: str
    figure: str
    plan: str
    batch: int
    interval: Interval
    actual: float

    @property
    def predicted(self) -> float:
        return self.interval.value

    @property
    def relative(self) -> float:
        return abs(self.predicted / self.actual - 1)


@dataclass(frozen=True)
class Gap:
    """Measurements of plans that cannot be predicted: how their layers are cut and stored, and why."""

    shape: str
    cut: Cut
    count: int
    reason: str


def errors(
    name: str, fingerprints: Iterable[Measurement], truth: Iterable[Measurement]
) -> tuple[list[Error], list[Gap]]:
    """The errors of all predictable runs, and the runs that are not predictable."""
    try:
        calibration = calibrate(spec(name), fingerprints)
    except ValueError as e:
        return [], _gaps(name, truth, str(e))
    known, unknown = list[Measurement](), list[Measurement]()
    for measured in truth:
        (known if _is_predictable(calibration, measured) else unknown).append(measured)
    return list(errors_of(name, calibration, known)), _gaps(name, unknown, "no fingerprint was cut so")


def _is_predictable(calibration: Calibration, measured: Measurement) -> bool:
    cut = Cut.of(measured.setting)
    if isinstance(measured, Timing):
        return cut in calibration.times
    return known_ranks(calibration, cut).is_measured


def _gaps(name: str, unknown: Iterable[Measurement], reason: str) -> list[Gap]:
    counts = Counter(Cut.of(measured.setting) for measured in unknown)
    return [Gap(name, cut, count, reason) for cut, count in sorted(counts.items())]


def errors_of(name: str, calibration: Calibration, truth: Iterable[Measurement]) -> Iterator[Error]:
    for measured in truth:
        if isinstance(measured, Timing):
            yield from _of_timing(name, calibration, measured)
        else:
            yield from _of_footprint(name, calibration, measured)


def _of_timing(name: str, calibration: Calibration, measured: Timing) -> Iterator[Error]:
    setting, point = measured.setting, measured.point
    work = Workload(point.batch, point.input_tokens, measured.output_tokens)
    found = predict(_ground(calibration, setting), _plan(setting), work)
    plan = _label(setting)
    yield Error(name, "TTFT", plan, point.batch, found.ttft_s, measured.ttft_s)
    step_s = found.step_s if measured.together else found.tpot_s
    yield Error(name, "TPOT", plan, point.batch, step_s, measured.tpot_s)


def _of_footprint(name: str, calibration: Calibration, measured: Footprint) -> Iterator[Error]:
    """The memory of a rank outside its KV cache, as the device counts it."""
    setting = measured.setting
    found = predict(_ground(calibration, setting), _plan(setting), Workload(1, 1, 1))
    for rank, actual in zip(found.ranks, measured.ranks, strict=True):
        low, value, high = (b - rank.kv_cache for b in (rank.total.low, rank.total.value, rank.total.high))
        yield Error(name, "memory", _label(setting), 0, Interval(value, low, high), measured.taken(actual))


def _ground(calibration: Calibration, setting: Setting) -> Ground:
    """Nothing is scaled from one device to another, so rates do not matter."""
    return Ground(calibration.spec, (DeviceRates(1.0, 1.0),) * setting.world_size, calibration)


def _plan(setting: Setting) -> Plan:
    return Plan(
        setting.tensor_parallel,
        setting.layers_per_stage,
        setting.quantization,
        max_model_len=1,
        kv_cache_tokens=0,
        max_variants=0,
        max_lora_rank=0,
        batched_tokens=setting.batched_tokens,
    )


def _label(setting: Setting) -> str:
    return f"tp{setting.tensor_parallel} {setting.layers_per_stage} {setting.quantization}"


def summary(found: list[Error]) -> list[dict[str, Any]]:
    """Percent, by figure and shape, figure and batch, and figure."""
    groups: defaultdict[tuple[str, str, str], list[Error]] = defaultdict(list)
    for error in found:
        for shape, batch in ((error.shape, "all"), ("all", str(error.batch)), ("all", "all")):
            groups[error.figure, shape, batch].append(error)
    return [
        {
            "figure": figure,
            "shape": shape,
            "batch": batch,
            "count": len(here),
            "median_percent": round(100 * float(np.median([one.relative for one in here])), 2),
            "p90_percent": round(100 * float(np.quantile([one.relative for one in here], 0.9)), 2),
            "in_interval_percent": round(
                100 * sum(one.interval.holds(one.actual) for one in here) / len(here)
            ),
        }
        for (figure, shape, batch), here in sorted(groups.items())
    ]


def write(
    found: list[Error],
    command: str,
    out: Path,
    title: str,
    costs: dict[str, Any] | None = None,
    gaps: Sequence[Gap] = (),
) -> None:
    """The summary as JSON, printed too, with unpredicted runs and the cost of measuring by shape, and the
    plot next to it."""
    rows = summary(found)
    for row in rows:
        print(" ".join(str(value) for value in row.values()))
    for gap in gaps:
        print(f"not predicted: {gap.count} measurements of {gap.shape}, {gap.cut}: {gap.reason}")
    record = {"command": command, "rows": rows, **({"costs": costs} if costs else {})}
    if gaps:
        record["not_predicted"] = [asdict(gap) for gap in gaps]
    rehearsing.write_result(out, record)
    if found:
        plot(found, out.with_suffix(".png"), title)


def plot(found: list[Error], path: Path, title: str) -> None:
    """Above predicted against measured, below the errors by batch: medians, and up to the 90th percentile."""
    figures = [name for name in FIGURES if any(error.figure == name for error in found)]
    drawing, axes = plot_style.new(2, len(figures), (4.6, 3.9))
    for (above, below), figure in zip(axes.T, figures, strict=True):
        mine = [error for error in found if error.figure == figure]
        _scatter(above, mine, figure)
        _by_batch(below, mine)
    plot_style.legend(drawing, axes)
    drawing.suptitle(title)
    plot_style.save(drawing, path)


def _scatter(axis: Any, found: list[Error], figure: str) -> None:
    per, unit = (GIB, "GiB") if figure == "memory" else (1e-3, "ms")
    for shape in sorted({error.shape for error in found}):
        mine = [error for error in found if error.shape == shape]
        actual, predicted = [e.actual / per for e in mine], [e.predicted / per for e in mine]
        axis.loglog(actual, predicted, ".", alpha=0.5, label=shape)
    low, high = axis.get_xlim()
    axis.plot([low, high], [low, high], color="black", linewidth=0.8)
    for each in axis.xaxis, axis.yaxis:
        plot_style.plain_log(each)
    axis.set(title=figure, xlabel=f"measured ({unit})", ylabel=f"predicted ({unit})")


def _by_batch(axis: Any, found: list[Error]) -> None:
    batches = sorted({error.batch for error in found})
    errors_of = {b: [100 * e.relative for e in found if e.batch == b] for b in batches}
    median = np.array([np.median(errors_of[b]) for b in batches])
    most = np.array([np.quantile(errors_of[b], 0.9) for b in batches])
    names = ["any" if batch == 0 else str(batch) for batch in batches]
    axis.bar(names, median, yerr=[np.zeros_like(median), most - median], capsize=4)
    axis.set(xlabel="batch", ylabel="error (%): median, 90th percentile")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fingerprints", type=Path, required=True)
    parser.add_argument("--truth", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(argv)
    fingerprints, truth = by_shape(given.fingerprints), by_shape(given.truth)
    scored = [errors(name, fingerprints.get(name, []), truth[name]) for name in truth]
    found = [error for errors_here, _ in scored for error in errors_here]
    gaps = [gap for _, gaps_here in scored for gap in gaps_here]
    files = f"--fingerprints {given.fingerprints.name} --truth {given.truth.name}"
    command = f"python -m benchmarks.profiling_errors {files} --out {given.out.name}"
    costs = {name: costs_of(fingerprints.get(name, []), truth[name]) for name in truth}
    write(found, command, given.out, "Measured on H200s", costs, gaps)


def costs_of(fingerprints: list[Measurement], truth: list[Measurement]) -> dict[str, Any]:
    try:
        return compared(fingerprints, truth)
    except ValueError as e:
        return {"not_compared": str(e)}


def rehearse(folder: Path) -> None:
    """With what was measured of one shape, as it is committed."""
    for kind in Kind.FINGERPRINTS, Kind.TRUTH:
        lines = merged(kind, rehearsing.RESULTS / "profiling").read_text().splitlines()
        of_one = [line for line in lines if f'"{REHEARSED}"' in line]
        merged(kind, folder).write_text("\n".join(of_one) + "\n")
    out = folder / "errors.json"
    files = [f"--{kind}={merged(kind, folder)}" for kind in (Kind.FINGERPRINTS, Kind.TRUTH)]
    main([*files, "--out", str(out)])
    rehearsing.check(out, "rows", "costs")
    assert out.with_suffix(".png").stat().st_size > 1000


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
