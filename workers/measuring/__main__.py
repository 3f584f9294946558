"""`python -m workers.measuring JOB.json`: start the engine once and measure every point of a job.

It prints a line per point; measurements go to the job's `out`. If a setting does not fit or a point fails,
the process ends with an error; earlier measurements are already on disk. With `--end-with-stdin` this process
and its whole session end when its standard input ends. `--holder=NAME`, the last argument, is for people and
programs that look at processes.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from profiler.measurements import (
    Footprint,
    Log,
    Measurement,
    Point,
    RankMemory,
    SyntheticVariant,
    Timing,
    read,
)
from workers.group import processes
from workers.measuring import engine, synthetic_variants
from workers.measuring.engine_run_job import Job, tokens_of
from workers.measuring.timing import run, timing, warm_up_tokens

QUICK_S, QUICK_REPEATS = 1.5, 9  # such a short load is noisy, and cheap to repeat
MIX_WARM_UP_TOKENS = 2
MIX_REPEATS = 2  # on a GPU; on a CPU each takes long


def measure(job: Job) -> None:
    began = time.monotonic()
    known = read(job.out) if job.out.exists() else ()
    wanted = missing(job, known)
    if not wanted:
        return
    log = Log(job.out)
    variants = requested(job)
    llm = engine.start(job)
    started_s = time.monotonic() - began - max(llm.collective_rpc("probe_waited"))
    if not any(isinstance(m, Footprint) and m.setting == job.setting for m in known):
        ranks = tuple(RankMemory(**memory) for memory in llm.collective_rpc("probe_memory"))
        log.append(Footprint(job.setting, ranks, started_s, job.distinct_layers, job.device_kind == "cpu"))
    for number, point in enumerate(wanted, 1):
        if time.monotonic() - began > job.seconds:
            print(
                f"{len(wanted) - number + 1} points were not measured: the {job.seconds:.0f} s are over",
                flush=True,
            )
            return
        timing = measure_point(llm, job, point, variants)
        log.append(timing)
        print(f"{number}/{len(wanted)} {describe(timing)}", flush=True)


def missing(job: Job, known: tuple[Measurement, ...]) -> list[Point]:
    """Points not measured yet, small ones first: they are quick, and warm the engine up."""
    done = {m.point for m in known if isinstance(m, Timing) and m.setting == job.setting}
    return sorted(set(job.points) - done)


def requested(job: Job) -> dict[SyntheticVariant, Any]:
    """Write the job's variants into its folder; returns vLLM's requests for them."""
    if not job.variants:
        return {}
    from vllm.lora.request import LoRARequest

    base = synthetic_variants.write_weightless(job.folder, job.dtype)
    layers = job.distinct_layers or job.setting.layers
    requests, written = {}, dict[SyntheticVariant, Path]()
    for number, variant in enumerate(job.variants, 1):
        folder, alike = job.folder / f"variant-{number}", replace(variant, seed=0)
        if alike in written:
            # The variant's values do not matter, only that it is a different variant: coding a delta takes
            # seconds.
            shutil.copytree(written[alike], folder, copy_function=os.link)
        else:
            written[alike] = synthetic_variants.write(variant, base, layers, folder)
        requests[variant] = LoRARequest(folder.name, number, str(folder))
    return requests


def measure_point(llm: Any, job: Job, point: Point, variants: Mapping[SyntheticVariant, Any]) -> Timing:
    """Measure one point. The device is timed during the warm-up only: events between its kernels would slow
    the other runs.
    """
    began = time.monotonic()
    prefill_steps, tokens = job.setting.prefill_steps(point.batch, point.input_tokens), tokens_of(job, point)
    repeats, quick_s = job.repeats, QUICK_S
    warm_up = warm_up_tokens(prefill_steps, tokens)
    if point.mix:
        warm_up, quick_s = MIX_WARM_UP_TOKENS, 0.0
        repeats = 1 if job.device_kind == "cpu" else min(MIX_REPEATS, job.repeats)
    llm.collective_rpc("probe_begin")
    run(llm, point, warm_up, 0, variants)
    steps = llm.collective_rpc("probe_end")
    runs = [run(llm, point, tokens, 1, variants)]
    while is_repeated(len(runs), repeats, time.monotonic() - began, job.point_seconds, quick_s):
        runs.append(run(llm, point, tokens, len(runs) + 1, variants))
    on_device = tuple(steps) if all(steps) else ()
    return timing(job.setting, point, tokens, runs, on_device, time.monotonic() - began)


def is_repeated(done: int, repeats: int, taken_s: float, limit_s: float, quick_s: float = QUICK_S) -> bool:
    """Whether to repeat a load that has run `done` times. A load shorter than `quick_s` runs more often than
    `repeats`.
    """
    if done < repeats:
        return taken_s < limit_s
    return repeats > 1 and done < QUICK_REPEATS and taken_s < min(quick_s, limit_s)


def describe(timing: Timing) -> str:
    point = timing.point
    mix = f" of {', '.join(variant.kind for variant in point.mix)}" if point.mix else ""
    return (
        f"batch {point.batch}, {point.input_tokens} tokens in{mix}: TTFT {timing.ttft_s * 1e3:.1f} ms, "
        f"TPOT {timing.tpot_s * 1e3:.2f} ms"
    )


def main() -> None:
    if "--end-with-stdin" in sys.argv[2:]:
        processes.end_with_stdin()
    measure(Job.model_validate_json(Path(sys.argv[1]).read_text()))


if __name__ == "__main__":
    main()
