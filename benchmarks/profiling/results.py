"""Measurements in files: each engine appends to a part of its own; parts of several runs are merged into one
file by kind, `truth.jsonl` and others, whose lines also name the shape."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.profiling.tasks import Kind, Task
from profiler.measurements import Footprint, Measurement, Timing, from_lines, read, to_line

PARTS, FAILURES, LOGS = "parts", "failures.jsonl", "logs"


def part(task: Task, out: Path) -> Path:
    return out / PARTS / f"{task.label}.jsonl"


def merged(kind: Kind, folder: Path) -> Path:
    return folder / f"{kind}.jsonl"


def rows(path: Path) -> Iterator[tuple[str, Measurement]]:
    """Shape and measurement of each line of a merged file. Raises MeasurementError."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        row = json.loads(line)
        shape = row.pop("shape")
        yield from ((shape, m) for m in from_lines([json.dumps(row)], f"{path}, line {number}"))


def by_shape(path: Path) -> dict[str, list[Measurement]]:
    found: defaultdict[str, list[Measurement]] = defaultdict(list)
    for shape, measurement in rows(path):
        found[shape].append(measurement)
    return found


def merge(folders: Iterable[Path], into: Path) -> dict[Kind, int]:
    """Add what `folders` have, in their order, to the merged files in `into`; how many lines each has then.

    The first measurement of a load that was measured twice counts.
    """
    folders = tuple(folders)
    into.mkdir(parents=True, exist_ok=True)
    counts = {}
    for kind in Kind:
        found: dict[Any, str] = {}
        for shape, measurement in _everything(kind, (into, *folders)):
            found.setdefault((shape, *_load(measurement)), _line(shape, measurement))
        if found:
            merged(kind, into).write_text("".join(line + "\n" for line in found.values()))
            counts[kind] = len(found)
    return counts


def _everything(kind: Kind, folders: Iterable[Path]) -> Iterator[tuple[str, Measurement]]:
    for folder in folders:
        if merged(kind, folder).exists():
            yield from rows(merged(kind, folder))
        for path in sorted((folder / PARTS).glob(f"{kind}.*.jsonl")):
            shape = path.name.removeprefix(f"{kind}.").split(".tp")[0]
            yield from ((shape, measurement) for measurement in read(path))


def _load(measurement: Measurement) -> tuple[Any, ...]:
    point = measurement.point if isinstance(measurement, Timing) else None
    return type(measurement), measurement.setting, point


def _line(shape: str, measurement: Measurement) -> str:
    return json.dumps({"shape": shape, **json.loads(to_line(measurement))})


def is_complete(task: Task, measurements: Iterable[Measurement]) -> bool:
    """Whether each of the task's loads is there, and its memory."""
    mine = [m for m in measurements if m.setting == task.setting]
    points = {m.point for m in mine if isinstance(m, Timing)}
    return points.issuperset(task.points) and any(isinstance(m, Footprint) for m in mine)


def missing(tasks: Iterable[Task], known: Iterable[Path]) -> list[Task]:
    """Tasks that none of the folders `known` has whole."""
    found: defaultdict[tuple[Kind, str], list[Measurement]] = defaultdict(list)
    known = tuple(known)
    for kind in Kind:
        for shape, measurement in _everything(kind, known):
            found[kind, shape].append(measurement)
    return [task for task in tasks if not is_complete(task, found[task.kind, task.shape])]
