"""Recorded traffic: the CSVs of Azure's LLM inference traces, and DeltaZip's JSON lines.

- Azure (2023): `TIMESTAMP,ContextTokens,GeneratedTokens`. It has no variants, so these are drawn.
- DeltaZip: objects with `timestamp` (seconds), `model`, `prompt` and `max_tokens`. A prompt counts one token
for every four bytes, as in the gateway.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from controlplane.traffic.request_terms import BYTES_PER_TOKEN
from placement.solver.schema import ScenarioError

MAX_BYTES = 1 << 30
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class Trace(NamedTuple):
    """Requests in the order of time. `arrival_s` from the first one; lengths in tokens, at least 1; `models`
    [N] are numbers from 0 in the order of the names' numbers, or None if no models are named."""

    arrival_s: npt.NDArray[np.float64]
    prompt: npt.NDArray[np.int64]
    output: npt.NDArray[np.int64]
    models: npt.NDArray[np.int64] | None

    @property
    def rate_per_s(self) -> float:
        """The mean rate; 1 for a single request."""
        span_s = float(self.arrival_s[-1])
        return (len(self.arrival_s) - 1) / span_s if span_s > 0 else 1.0


def read(path: Path) -> Trace:
    """Raises ScenarioError, with the line."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ScenarioError(f"traffic.file: expected at most {MAX_BYTES} bytes in {path}")
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(_json_lines(file) if path.suffix == ".jsonl" else _azure(file))
    except ScenarioError as error:
        raise ScenarioError(f"traffic.file: {path}: {error}") from error
    except (OSError, ValueError, csv.Error) as error:
        raise ScenarioError(f"traffic.file: {path} is not a valid trace: {error}") from error
    if not rows:
        raise ScenarioError(f"traffic.file: expected requests in {path}, got none")
    rows.sort(key=lambda row: row[0])
    names = sorted({row[3] for row in rows if row[3] is not None}, key=_by_number)
    number = {name: place for place, name in enumerate(names)}
    if names and any(row[3] is None for row in rows):
        raise ScenarioError(
            f"traffic.file: {path}: expected a model either in every line or in no line, got both kinds of "
            "lines"
        )
    arrival_s = np.array([row[0] for row in rows])
    return Trace(
        arrival_s - arrival_s[0],
        np.array([row[1] for row in rows]),
        np.array([row[2] for row in rows]),
        np.array([number[row[3]] for row in rows if row[3] is not None]) if names else None,
    )


Row = tuple[float, int, int, str | None]


def _azure(file: Any) -> Iterator[Row]:
    reader = csv.reader(file)
    header = next(reader, [])
    if tuple(header) != AZURE:
        raise ScenarioError(f"expected the header {','.join(AZURE)}, got {','.join(header)[:100]}")
    for number, row in enumerate(reader, start=2):
        try:
            stamp, prompt, output = row
            seconds = (np.datetime64(stamp.strip()) - np.datetime64("2000-01-01")) / np.timedelta64(1, "s")
            yield float(seconds), max(1, int(prompt)), max(1, int(output)), None
        except ValueError as error:
            raise ScenarioError(f"line {number}: expected {','.join(AZURE)}: {error}") from error


def _json_lines(file: Any) -> Iterator[Row]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompt = max(1, len(entry["prompt"].encode()) // BYTES_PER_TOKEN)
            model = entry.get("model")
            output = max(1, int(entry["max_tokens"]))
            yield float(entry["timestamp"]), prompt, output, None if model is None else str(model)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            fields = "timestamp, prompt and max_tokens"
            raise ScenarioError(f"line {number}: expected an object with {fields}: {error!r}") from error


def _by_number(name: str) -> tuple[str, int]:
    """A sort key that puts `delta-2` before `delta-10`."""
    found = re.fullmatch(r"(.*?)(\d{1,18})", name)
    return (found[1], int(found[2])) if found else (name, -1)
