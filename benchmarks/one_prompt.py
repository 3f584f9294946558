"""When the first token of one short prompt comes, again and again on an engine that is otherwise idle: so
small a step takes what the host takes to launch it.

    python -m benchmarks.one_prompt --out RESULT.json     # Llama-2-7B's shape, one GPU, 80 s; made-up weights

Phases of seconds each: as soon as the engine is up; after a load of 128; with pauses between requests; while
other processes take half of the engine's cores, or all others of the host; at rest again. Start it with
`taskset` on a part of the host's cores, as engines have in benchmarks.profiling; several at once for several
GPUs. The committed result is of an earlier form of this file: two at once, on two GPUs, twice.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import rehearsing
from benchmarks.gpu_job import gpu_job
from profiler.measurements import Point, Setting
from workers.measuring import engine
from workers.measuring.timing import run

SHAPE, LAYERS, TOKENS = "llama-2-7b", 32, 48
ONE, MANY = Point(1, 128), Point(128, 128)
SPINNING = "while True: pass"


@contextmanager
def spinning(cores: Set[int], processes: int) -> Iterator[None]:
    command = ["taskset", "-c", ",".join(map(str, sorted(cores))), sys.executable, "-c", SPINNING]
    others = [subprocess.Popen(command) for _ in range(processes)]
    yield
    for other in others:
        other.kill()
        other.wait()


def phase(llm: Any, name: str, seconds: float, pause_s: float = 0.0) -> dict[str, Any]:
    began, first_ms, step_ms = time.monotonic(), list[float](), list[float]()
    while len(first_ms) < 2 or time.monotonic() - began < seconds:
        time.sleep(pause_s)
        found = run(llm, ONE, TOKENS, time.monotonic_ns())
        first_ms.append(found.first[0] * 1e3)
        step_ms.append(found.step_s * 1e3)
    lower, middle, upper = statistics.quantiles(first_ms, n=4)
    row = {
        "phase": name,
        "requests": len(first_ms),
        "ttft_ms": {"least": min(first_ms), "quartiles": [lower, middle, upper], "most": max(first_ms)},
        "first_nine_ms": first_ms[:9],
        "tpot_ms": statistics.median(step_ms),
    }
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        job = gpu_job(SHAPE, Setting((LAYERS,)), (ONE, MANY), TOKENS, Path(work))
        llm = engine.start(job)
        rows = phases(llm, MANY, 4)
    write(given.out, rows)


def phases(llm: Any, many: Point, seconds: float) -> list[dict[str, Any]]:
    """Each of so many seconds, the first of half as many more."""
    own = os.sched_getaffinity(0)
    others = set(range(os.cpu_count() or 1)) - own
    rows = [phase(llm, "up", 1.5 * seconds)]
    run(llm, many, TOKENS // 2, 0)
    rows.append(phase(llm, f"after {many.batch}", seconds))
    rows.append(phase(llm, "with pauses", seconds, pause_s=0.05))
    with spinning(own, len(own) // 2):
        rows.append(phase(llm, "half of its cores taken", seconds))
    with spinning(others or own, len(others)):
        rows.append(phase(llm, "all other cores taken", seconds))
    return [*rows, phase(llm, "at rest", seconds)]


def write(out: Path, rows: list[dict[str, Any]]) -> None:
    command = "python -m benchmarks.one_prompt --out RESULT.json"
    cores = len(os.sched_getaffinity(0))
    rehearsing.write_result(out, {"command": command, "cores": cores, "rows": rows})


def rehearse(folder: Path, llm: Any) -> None:
    """All phases, two requests each."""
    write(folder / "one_prompt.json", phases(llm, Point(4, 128), 0))
    assert len(rehearsing.check(folder / "one_prompt.json")["rows"]) == 6


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
