"""Memory of processes over time, and whether it grows."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from benchmarks.live.background import Background

MIB = 1 << 20
LARGEST = 8
AT_ONCE_S, STARTED_S = 10.0, 120.0  # since the load began; since a process did
ENOUGH = 8  # samples, for a quarter to have two


@dataclass
class Series:
    """Samples of one process: seconds since the start, and bytes: resident, and its share of shared
    memory."""

    name: str
    at_s: list[float] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    pss: list[int] = field(default_factory=list)


class Sampler(Background):
    """`with Sampler(processes):` looks every `every_s` seconds at all processes that there are then."""

    def __init__(self, processes: Callable[[], Sequence[psutil.Process]], every_s: float = 5.0) -> None:
        self._processes, self._every_s = processes, every_s
        super().__init__()
        self.series: dict[int, Series] = {}

    def _run(self) -> None:
        while True:
            for process in self._processes():
                self._look(process)
            if self._stop.wait(self._every_s):
                return

    def _look(self, process: psutil.Process) -> None:
        try:
            found, name = process.memory_full_info(), _name(process)
        except psutil.Error:
            return  # it has ended
        one = self.series.setdefault(process.pid, Series(name))
        one.name = name  # Ray and vLLM rename their processes when they know what they are for
        one.at_s.append(round(time.monotonic() - self._start, 2))
        one.rss.append(found.rss)
        one.pss.append(found.pss)


def _name(process: psutil.Process) -> str:
    """The name that the process gives itself, without folders."""
    line = process.cmdline() or [process.name()]
    words = [word.rpartition("/")[2] for word in line[:3] if not word.startswith("-X")]
    return " ".join(words).strip()[:60]


def growth(at_s: Sequence[float], values: Sequence[int]) -> dict[str, float] | None:
    """The growth from the first quarter's mean to the last one's: MiB, the share of the first, MiB per
    minute. A process that came later than the others counts once it has started. None: too few samples."""
    if at_s and at_s[0] > AT_ONCE_S:
        started = bisect_left(at_s, at_s[0] + STARTED_S)
        at_s, values = at_s[started:], values[started:]
    if len(values) < ENOUGH:
        return None
    quarter = len(values) // 4
    first, last = np.mean(values[:quarter]), np.mean(values[-quarter:])
    apart_s = np.mean(at_s[-quarter:]) - np.mean(at_s[:quarter])
    return {
        "first_mib": round(float(first) / MIB, 1),
        "last_mib": round(float(last) / MIB, 1),
        "share": round(float(last / first - 1), 4) if first else 0.0,
        "mib_per_minute": round(float((last - first) / MIB / apart_s * 60), 3) if apart_s else 0.0,
    }


def _second_half(at_s: Sequence[float], values: Sequence[int]) -> tuple[list[float], list[int]]:
    """The growth over the samples, counted from the half, so that a process that was there from the start has
    started."""
    half = len(at_s) // 2
    return [one - at_s[half] for one in at_s[half:]], list(values[half:])


def lasting(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The part of what `memory_rows` has about processes that were there for at least half of the time."""
    most = max((row["samples"] for row in rows), default=0)
    return [row for row in rows if 2 * row["samples"] >= most]


def memory_rows(series: dict[int, Series]) -> list[dict[str, Any]]:
    """A row for each process, the largest first; only the largest with all that was seen of them."""
    rows: list[dict[str, Any]] = [
        {
            "pid": pid,
            "process": one.name,
            "samples": len(one.at_s),
            "pss": growth(one.at_s, one.pss),
            "rss": growth(one.at_s, one.rss),
            "pss_in_the_second_half": growth(*_second_half(one.at_s, one.pss)),
            "largest_mib": round(max(one.pss) / MIB, 1),
        }
        for pid, one in series.items()
        if one.at_s
    ]
    rows.sort(key=lambda row: -row["largest_mib"])
    for row in rows[:LARGEST]:
        one = series[row["pid"]]
        row |= {"at_s": one.at_s, "pss_mib": [round(value / MIB, 1) for value in one.pss]}
    return rows
