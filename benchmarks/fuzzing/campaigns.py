"""Many seeds in parts, each by a process of its own; what is found is written after each part."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from benchmarks import rehearsing


class Adding(Protocol):
    broken: list[dict[str, Any]]

    def add(self, other: Self) -> None: ...


F = TypeVar("F", bound=Adding)


@dataclass(frozen=True)
class Campaign:
    """`name` is the module that is run, `about` its text."""

    name: str
    about: str | None
    count: int
    chunk: int


def run(
    campaign: Campaign,
    look: Callable[[range], F],
    found: F,
    summary: Callable[[str, int, F, float], dict[str, Any]],
    said: Callable[[int, F], str],
    argv: Sequence[str] | None,
) -> int:
    """`look` at the seeds of each part, `found` adds them up; the exit status is 1 when something broke."""
    parser = rehearsing.parser(campaign.about)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=campaign.count)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--processes", type=int, default=1)
    asked = parser.parse_args(argv)
    command = rehearsing.command(campaign.name, argv)
    ends = asked.seed + asked.count
    parts = [range(at, min(ends, at + campaign.chunk)) for at in range(asked.seed, ends, campaign.chunk)]
    began_s = time.monotonic()
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(asked.processes, spawning, max_tasks_per_child=1) as pool:
        for part in pool.map(look, parts):
            found.add(part)
            rehearsing.write_result(asked.out, summary(command, asked.seed, found, began_s))
            print(said(asked.count, found), flush=True)
    return 1 if found.broken else 0
