"""Reads the paper artifact's CSV tables, unchanged, as measurements.

    Model,TP,PP,PP_Map,DTYPE,INT8_KV_Cache,Output_Lenght,Batch_Size,Latency,Memory-Pre-Run,Memory-After-Run,
    Time-Gen-Graph,Time-Prof               ("Lenght" is the artifact's; fingerprints add Time-Gen-Fingerprint)

Latency and times are seconds, memory is GiB summed over GPUs. `PP_Map` has the layers of each stage, so its
sum is the number of layers of the model that the row measured. Columns may come in any order and there may
be others; rows may repeat (replicates); the header may come again where tables were joined.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import median
from typing import TypeVar

from controlplane.baselines.estimators import cells
from controlplane.baselines.estimators.types import Family, Query, TableError

GIB = 2**30
MAX_BYTES = 256 * 2**20
REQUIRED = ("Model", "TP", "PP", "PP_Map", "DTYPE", "INT8_KV_Cache", "Output_Lenght", "Batch_Size", "Latency")
# The artifact's estimator reads the memory after the run: weights, caches and workspaces are all there.
MEMORY_COLUMN = "Memory-After-Run"
PRE_RUN_COLUMN = "Memory-Pre-Run"

MEMORY_COLUMNS = (MEMORY_COLUMN, PRE_RUN_COLUMN)

T = TypeVar("T")


@dataclass(frozen=True)
class Measurement:
    """One row. `memory_bytes`: MEMORY_COLUMN, over all GPUs. `run_bytes`: the part that the run added to
    PRE_RUN_COLUMN. None where they were not measured."""

    query: Query
    latency_s: float
    memory_bytes: float | None
    line: int
    run_bytes: float | None = None


@dataclass(frozen=True)
class Failure:
    """A row without a measurement, and its cell's text."""

    line: int
    reason: str


@dataclass(frozen=True)
class Table:
    name: str
    rows: tuple[Measurement, ...]
    failures: tuple[Failure, ...]

    def failure_counts(self) -> dict[str, int]:
        return dict(sorted(Counter(failure.reason for failure in self.failures).items()))


@dataclass(frozen=True)
class Point:
    """The median of the replicates of one query."""

    query: Query
    latency_s: float
    memory_bytes: float | None
    replicates: int
    run_bytes: float | None = None


def read_table(path: Path) -> Table:
    """Read a table. Raises TableError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise TableError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_BYTES:
        raise TableError(f"{path}: expected a table of at most {MAX_BYTES} bytes")
    try:
        return parse_table(data.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise TableError(
            f"{path}: expected a CSV file in UTF-8, but byte {error.start} is not UTF-8"
        ) from error


def parse_table(text: str, name: str = "table") -> Table:
    """Parse a table. Raises TableError naming line and column."""
    lines = _lines(text, name)
    header = next(lines, None)
    if header is None:
        raise TableError(f"{name}: expected a header line with {', '.join(REQUIRED)}; the file is empty")
    columns = _columns(header[1], name)
    rows: list[Measurement] = []
    failures: list[Failure] = []
    for line, values in lines:
        named = {key: values[at].strip() if at < len(values) else "" for key, at in columns.items()}
        if _key(named["model"]) == "model" and _key(named["tp"]) == "tp":
            continue
        reason = cells.failure(named["latency"])
        if reason is None:
            rows.append(_measurement(named, f"{name}, line {line}", line))
        else:
            failures.append(Failure(line, reason))
    if not rows:
        raise TableError(
            f"{name}: expected at least one measured row, found only {len(failures)} failed rows"
        )
    return Table(name, tuple(rows), tuple(failures))


def points(rows: Iterable[Measurement]) -> tuple[Point, ...]:
    """One point per query, in the order of queries: the order of rows has no meaning."""
    grouped: dict[Query, list[Measurement]] = {}
    for row in rows:
        grouped.setdefault(row.query, []).append(row)
    return tuple(_point(query, grouped[query]) for query in sorted(grouped))


def by_family(rows: Sequence[Point]) -> dict[Family, tuple[Point, ...]]:
    families = sorted({point.query.family for point in rows})
    return {family: tuple(p for p in rows if p.query.family == family) for family in families}


def _point(query: Query, rows: Sequence[Measurement]) -> Point:
    memory = [row.memory_bytes for row in rows if row.memory_bytes is not None]
    run = [row.run_bytes for row in rows if row.run_bytes is not None]
    return Point(
        query,
        median(row.latency_s for row in rows),
        median(memory) if memory else None,
        len(rows),
        median(run) if run else None,
    )


def _lines(text: str, name: str) -> Iterator[tuple[int, list[str]]]:
    """(line number, cells) of every non-blank line."""
    text = text.lstrip("\ufeff")
    first = text.lstrip().partition("\n")[0]
    delimiter = max(",;\t", key=first.count)
    reader = csv.reader(StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)
    try:
        for values in reader:
            if any(value.strip() for value in values):
                yield reader.line_num, values
    except csv.Error as error:
        raise TableError(f"{name}, line {reader.line_num}: expected CSV: {error}") from error


def _key(column: str) -> str:
    """A column's name without case, spaces and dashes, with either spelling of "Lenght"."""
    return re.sub(r"[\s_\-\ufeff'\"]", "", column).lower().replace("lenght", "length")


def _columns(header: Sequence[str], name: str) -> dict[str, int]:
    places: dict[str, int] = {}
    for at, column in enumerate(header):
        if _key(column) in places and _key(column) in map(_key, (*REQUIRED, *MEMORY_COLUMNS)):
            raise TableError(f"{name}, line 1: expected the column {column.strip()} once, found it twice")
        places.setdefault(_key(column), at)
    missing = [column for column in REQUIRED if _key(column) not in places]
    if missing:
        raise TableError(
            f"{name}, line 1: expected the columns {', '.join(REQUIRED)}; missing {', '.join(missing)}"
        )
    wanted = (*REQUIRED, *MEMORY_COLUMNS)
    return {_key(column): places[_key(column)] for column in wanted if _key(column) in places}


def _measurement(named: Mapping[str, str], place: str, line: int) -> Measurement:
    def read(column: str, parse: Callable[[str], T]) -> T:
        cell = named.get(_key(column), "")
        try:
            return parse(cell)
        except ValueError as error:
            raise TableError(f"{place}, column {column}: {error}, found {cell[:40]!r}") from error

    family = Family(
        read("Model", cells.model_name), read("DTYPE", cells.dtype), read("INT8_KV_Cache", cells.flag)
    )
    stages = read("PP", lambda cell: cells.count(cell, cells.MAX_RANKS))
    layers = read("PP_Map", cells.layer_map)
    if len(layers) != stages:
        raise TableError(
            f"{place}, column PP_Map: expected the layers of {stages} stages, found {named[_key('PP_Map')]!r}"
        )
    query = Query(
        family,
        read("TP", lambda cell: cells.count(cell, cells.MAX_RANKS)),
        layers,
        read("Output_Lenght", cells.count),
        read("Batch_Size", cells.count),
    )
    memory = read(MEMORY_COLUMN, cells.optional)
    before = read(PRE_RUN_COLUMN, cells.optional)
    run = max(0.0, memory - before) * GIB if memory and before else None
    return Measurement(query, read("Latency", cells.positive), memory * GIB if memory else None, line, run)
