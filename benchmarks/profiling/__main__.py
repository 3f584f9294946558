"""Measures plans of whole models, and their fingerprints, on the GPUs of one host, one engine after another.

    python -m benchmarks.profiling measure --out FOLDER [--budget-s 540] [--kinds truth,fingerprints,variants]
        [--tier 1] [--shapes llama-2-7b,...] [--quantizations none,fp8] [--known FOLDER ...]
        [--gpus 4] [--first-gpu 0] [--least-gpus 2]
    python -m benchmarks.profiling merge --into FOLDER FOLDER ...

`truth` is the whole model (made-up weights) in many plans; `fingerprints` what a profile of it measures, with
a few layers' weights (workers/patches/vllm/layer_sharing.py). The command writes rows as they come. It does
not measure again what FOLDER, or a folder that is `known`, holds. failures.jsonl says what failed and why;
logs are in logs/. Two commands may share a host, each with its own `--first-gpu`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import rehearsing
from benchmarks.profiling import results, shapes
from benchmarks.profiling.tasks import (
    DEVICE_BYTES,
    MAX_MODEL_LEN,
    POINT_SECONDS,
    REPEATS,
    Kind,
    Task,
    chosen,
    on_cpu,
)
from profiler.measurements import read
from workers.group import jobs
from workers.group.members import visible_gpus
from workers.measuring.engine_run_job import Job

PYTHON = (sys.executable, "-X", "faulthandler", "-m")
ENGINE = "workers.measuring"
STAND_IN = "benchmarks.profiling.stand_in"
# Engines choose ports long before they use them. Commands that share a host use separate ranges.
FIRST_PORT, PORTS_PER_GPU = 12_000, 5_000
SLOWER, GRACE_S = 1.3, 75.0  # times the expected seconds, and more, until an engine is ended
LOG_TAIL = 3000


class Host:
    """Runs a task's engine on GPUs of this host, or on its CPU to rehearse."""

    def __init__(self, out: Path, work: Path, device: str, first_gpu: int = 0) -> None:
        self._out, self._work, self._device, self._first_gpu = out, work, device, first_gpu
        self._engine = STAND_IN if rehearsing.is_rehearsal() else ENGINE
        for folder in (results.PARTS, results.LOGS):
            (out / folder).mkdir(parents=True, exist_ok=True)

    def measure(self, task: Task, left_s: float) -> str:
        """Run the engine for at most `left_s`, and return why it failed, or nothing."""
        request, log = self._work / f"{task.label}.json", self._out / results.LOGS / f"{task.label}.log"
        request.write_text(self._job(task, left_s).model_dump_json())
        gpus = tuple(range(self._first_gpu, self._first_gpu + task.gpus))
        port = str(FIRST_PORT + PORTS_PER_GPU * self._first_gpu)
        with log.open("wb") as file:
            process = subprocess.Popen(
                (*PYTHON, self._engine, str(request), "--end-with-stdin"),
                env={**os.environ, **visible_gpus(gpus), "VLLM_LOGGING_LEVEL": "INFO", "VLLM_PORT": port},
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            code = process.wait(min(left_s, SLOWER * task.expected_s + GRACE_S))
        except subprocess.TimeoutExpired:
            part = results.part(task, self._out)
            complete = part.exists() and results.is_complete(task, read(part))
            return "" if complete else f"took too long: {jobs.last_words(log)}"
        finally:
            jobs.end(process)
        return f"{jobs.exit_reason(code)}: {jobs.last_words(log)}" if code else ""

    def _job(self, task: Task, left_s: float) -> Job:
        on_gpu = self._device != "cpu"
        return Job(
            folder=shapes.folder(task.shape, task.setting.layers, self._work / task.label),
            out=results.part(task, self._out),
            setting=task.setting,
            points=task.points,
            device_kind=self._device,
            device_bytes=DEVICE_BYTES,
            dtype="bfloat16" if on_gpu else "float32",
            graphs=on_gpu,
            output_tokens=task.output_tokens,
            repeats=REPEATS,
            distinct_layers=task.distinct_layers,
            max_model_len=MAX_MODEL_LEN,
            seconds=left_s,
            point_seconds=POINT_SECONDS,
        )


def measure(given: argparse.Namespace) -> None:
    kinds = [Kind(kind) for kind in given.kinds.split(",")]
    tasks = chosen(kinds, given.shapes.split(","), given.quantizations.split(","), given.gpus, given.tier)
    tasks = [
        on_cpu(task) if given.device == "cpu" else task for task in tasks if task.gpus >= given.least_gpus
    ]
    missing = results.missing(sorted(tasks, key=lambda task: task.tier), (given.out, *given.known))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an engine that hangs is aborted; its dump takes long
    ends = time.monotonic() + given.budget_s
    with tempfile.TemporaryDirectory() as work:
        host = Host(given.out, Path(work), given.device, given.first_gpu)
        for task in missing:
            left_s = ends - time.monotonic()
            problem = host.measure(task, left_s) if task.expected_s <= left_s else "not begun: too late"
            tell(task, problem, given.out)
    merge(given.out, [given.out])


def tell(task: Task, problem: str, out: Path) -> None:
    print(f"{task.label} (expected {task.expected_s:.0f} s): {problem or 'measured'}", flush=True)
    if problem:
        log = out / results.LOGS / f"{task.label}.log"
        tail = log.read_text(errors="replace")[-LOG_TAIL:] if log.exists() else ""
        with (out / results.FAILURES).open("a") as file:
            file.write(json.dumps({"task": task.label, "problem": problem, "log": tail}) + "\n")


def merge(into: Path, folders: list[Path]) -> None:
    for kind, count in results.merge(folders, into).items():
        print(f"{results.merged(kind, into)}: {count} measurements")


def main(argv: Sequence[str] | None = None) -> None:
    parser = rehearsing.parser(__doc__)
    commands = parser.add_subparsers(required=True)
    measuring = commands.add_parser("measure")
    measuring.set_defaults(run=measure)
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--known", type=Path, nargs="*", default=[])
    measuring.add_argument("--kinds", default=f"{Kind.FINGERPRINTS},{Kind.TRUTH}")
    measuring.add_argument("--shapes", default=",".join(shapes.GPU_SHAPES))
    measuring.add_argument("--quantizations", default="none")
    measuring.add_argument("--tier", type=int, default=1)
    measuring.add_argument("--gpus", type=int, default=4)
    measuring.add_argument("--first-gpu", type=int, default=0, help="those before it are left to others")
    measuring.add_argument("--least-gpus", type=int, default=1)
    measuring.add_argument("--budget-s", type=float, default=540)
    measuring.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    merging = commands.add_parser("merge")
    merging.set_defaults(run=lambda given: merge(given.into, given.folders))
    merging.add_argument("--into", type=Path, required=True)
    merging.add_argument("folders", type=Path, nargs="+")
    given = parser.parse_args(argv)
    given.run(given)


def rehearse(folder: Path) -> None:
    """A tiny model's plans on up to two GPUs, with processes that stand in for engines; and merging."""
    out, again = folder / "measured", folder / "merged"
    options = "--device cpu --shapes tiny --gpus 2 --kinds fingerprints,truth,variants --tier 3"
    main(["measure", "--out", str(out), *shlex.split(options)])
    rehearsing.write_result(out / "rehearsal.json", {"measured_by": STAND_IN})
    assert not (out / results.FAILURES).exists(), (out / results.FAILURES).read_text()
    main(["merge", "--into", str(again), str(out)])
    assert results.by_shape(results.merged(Kind.TRUTH, again)).keys() == {"tiny"}
    tasks = chosen(list(Kind), ["tiny"], ["none"], 2, 3)
    assert not results.missing(map(on_cpu, tasks), [again]), "not everything was measured"


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
