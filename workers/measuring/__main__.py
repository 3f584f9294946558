"""`python -m workers.measuring JOB.json`: start the engine once and measure every point of a job.

Prints a line per point; measurements go to the job's `out`. A setting that does not fit or a point that
fails ends the process with an error after what was measured before it is safe on disk. With
`--end-with-stdin` this process and all of its session end when its standard input does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from profiler.measurements import Footprint, Log, Measurement, Point, RankMemory, Timing, read
from workers.measuring import engine
from workers.measuring.job import Job
from workers.measuring.timing import run, timing

WARM_UP_TOKENS = 8


def measure(job: Job) -> None:
    began = time.monotonic()
    known = read(job.out) if job.out.exists() else ()
    wanted = missing(job, known)
    if not wanted:
        return
    log = Log(job.out)
    llm = engine.start(job)
    started_s = time.monotonic() - began - max(llm.collective_rpc("probe_waited"))
    if not any(isinstance(m, Footprint) and m.setting == job.setting for m in known):
        ranks = tuple(RankMemory(**found) for found in llm.collective_rpc("probe_memory"))
        log.append(Footprint(job.setting, ranks, started_s, job.distinct_layers, job.device_kind == "cpu"))
    for number, point in enumerate(wanted, 1):
        if time.monotonic() - began > job.seconds:
            print(f"{len(wanted) - number + 1} points not begun: {job.seconds:.0f} s are over", flush=True)
            return
        found = measure_point(llm, job, point)
        log.append(found)
        print(f"{number}/{len(wanted)} {describe(found)}", flush=True)


def missing(job: Job, known: tuple[Measurement, ...]) -> list[Point]:
    """Points not measured yet, small ones first: they are quick, and warm the engine up."""
    done = {m.point for m in known if isinstance(m, Timing) and m.setting == job.setting}
    return sorted(set(job.points) - done)


def measure_point(llm: Any, job: Job, point: Point) -> Timing:
    """The device is watched while it warms up: events between its kernels would take the others time."""
    began = time.monotonic()
    llm.collective_rpc("probe_begin")
    run(llm, point, WARM_UP_TOKENS, seed=0)
    steps = llm.collective_rpc("probe_end")
    runs = [run(llm, point, job.output_tokens, seed=1)]
    while len(runs) < job.repeats and time.monotonic() - began < job.point_seconds:
        runs.append(run(llm, point, job.output_tokens, seed=len(runs) + 1))
    return timing(job.setting, point, job.output_tokens, runs, tuple(steps) if all(steps) else ())


def describe(found: Timing) -> str:
    point = found.point
    return (
        f"batch {point.batch}, {point.input_tokens} tokens in: TTFT {found.ttft_s * 1e3:.1f} ms, "
        f"TPOT {found.tpot_s * 1e3:.2f} ms"
    )


def end_with_stdin() -> None:
    """Whoever started this process holds the other end, and need not live to end it."""

    def wait() -> None:
        while os.read(0, 4096):  # sys.stdin would be locked when this process ends otherwise
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    if "--end-with-stdin" in sys.argv[2:]:
        end_with_stdin()
    measure(Job.model_validate_json(Path(sys.argv[1]).read_text()))


if __name__ == "__main__":
    main()
