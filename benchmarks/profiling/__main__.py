"""Measures plans of whole models, and their fingerprints, on the GPUs of one host, several engines at a time.

    python -m benchmarks.profiling measure --out FOLDER [--budget-s 540] [--kinds truth,fingerprints,variants]
        [--tier 1] [--shapes llama-2-7b,...] [--quantizations none,fp8] [--known FOLDER ...] [--dry-run]
        [--gpus 4] [--first-gpu 0] [--least-gpus 2] [--most-gpus 4] [--kinds-first]
    python -m benchmarks.profiling merge --into FOLDER FOLDER ...

`truth` is the whole model (made-up weights) in many plans; `fingerprints` what a profile of it measures, with
a few layers' weights (workers/measuring/layer_sharing.py). Rows are written as they come; what FOLDER, or one
that is `known`, holds is not measured again. What fails, and why, is in failures.jsonl; logs are in logs/.
Engines on one GPU may be measured on another host, with `--gpus 1`, and left out here with `--least-gpus 2`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import rehearsing
from benchmarks.profiling import results, shapes
from benchmarks.profiling.lanes import Ending, Start, carry_out
from benchmarks.profiling.schedule import Slot, cores_of, describe, pack
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
from workers.group.members import visible_gpus
from workers.measuring.engine_run_job import Job

PYTHON = (sys.executable, "-X", "faulthandler", "-m")
ENGINE = "workers.measuring"
STAND_IN = "benchmarks.profiling.stand_in"
# Engines choose ports long before they use them: each from a range of its own, below the ephemeral ones.
# Benchmarks that share a host, each from another first GPU, do not share ports either.
FIRST_PORT, PORTS, PORTS_PER_GPU = 12_000, 100, 5_000
LOG_TAIL = 3000


class Host:
    """Starts a task's engine on GPUs of this host, or on its CPU to rehearse."""

    def __init__(
        self, out: Path, work: Path, device: str, budget_s: float, gpus: int = 1, first_gpu: int = 0
    ) -> None:
        """There are `gpus` from `first_gpu` on."""
        self._out, self._work, self._device, self._budget_s = out, work, device, budget_s
        self._first_gpu, self._host_gpus = first_gpu, first_gpu + gpus
        self._engine = STAND_IN if rehearsing.is_rehearsal() else ENGINE
        for folder in (results.PARTS, results.LOGS):
            (out / folder).mkdir(parents=True, exist_ok=True)

    def start(self, slot: Slot, number: int) -> Start:
        task, request = slot.task, self._work / f"{number}.json"
        job = self._job(task, self._work / f"{number}.gate")
        request.write_text(job.model_dump_json())
        assert job.start_barrier is not None
        gpus = tuple(self._first_gpu + gpu for gpu in slot.gpus)
        return Start(
            (*PYTHON, self._engine, str(request), "--end-with-stdin"),
            {
                **os.environ,
                **visible_gpus(gpus),
                "VLLM_LOGGING_LEVEL": "INFO",
                "VLLM_PORT": str(FIRST_PORT + PORTS * number + PORTS_PER_GPU * self._first_gpu),
            },
            self._out / results.LOGS / f"{task.label}.log",
            job.start_barrier,
            lambda: job.out.exists() and results.is_complete(task, read(job.out)),
            lambda: job.out.stat().st_size if job.out.exists() else 0,
            cores_of(gpus, self._host_gpus, os.sched_getaffinity(0)),
        )

    def _job(self, task: Task, barrier: Path) -> Job:
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
            seconds=self._budget_s,
            point_seconds=POINT_SECONDS,
            start_barrier=barrier,
        )


def tell(ending: Ending, out: Path) -> None:
    task = ending.task
    said = ending.problem or "measured"
    print(f"{ending.seconds:4.0f} s (expected {task.expected_s:.0f}) {task.label}: {said}", flush=True)
    if ending.problem:
        row = {"task": task.label, "problem": ending.problem, "log": ending.log[-LOG_TAIL:]}
        with (out / results.FAILURES).open("a") as file:
            file.write(json.dumps(row) + "\n")


def measure(given: argparse.Namespace) -> None:
    kinds = [Kind(kind) for kind in given.kinds.split(",")]
    tasks = chosen(kinds, given.shapes.split(","), given.quantizations.split(","), given.gpus, given.tier)
    most = given.gpus if given.most_gpus is None else given.most_gpus
    tasks = [task for task in tasks if given.least_gpus <= task.gpus <= most]
    tasks = [on_cpu(task) for task in tasks] if given.device == "cpu" else tasks
    slots, left = pack(
        results.missing(tasks, (given.out, *given.known)), given.gpus, given.budget_s, given.kinds_first
    )
    print(describe(slots, left, given.gpus), flush=True)
    if given.dry_run:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an engine that hangs is aborted; its dump takes long
    with tempfile.TemporaryDirectory() as work:
        host = Host(given.out, Path(work), given.device, given.budget_s, given.gpus, given.first_gpu)
        carry_out(slots, host.start, given.budget_s, lambda ending: tell(ending, given.out))
    merge(given.out, [given.out])


def merge(into: Path, folders: list[Path]) -> None:
    for kind, count in results.merge(folders, into).items():
        print(f"{results.merged(kind, into)}: {count} measurements")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    measuring = commands.add_parser("measure")
    measuring.set_defaults(run=measure)
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--known", type=Path, nargs="*", default=[])
    measuring.add_argument("--kinds", default=f"{Kind.TRUTH},{Kind.FINGERPRINTS}")
    measuring.add_argument("--shapes", default=",".join(shapes.GPU_SHAPES))
    measuring.add_argument("--quantizations", default="none")
    measuring.add_argument("--tier", type=int, default=1)
    measuring.add_argument("--gpus", type=int, default=4)
    measuring.add_argument("--first-gpu", type=int, default=0, help="those before it are left to others")
    measuring.add_argument("--least-gpus", type=int, default=1)
    measuring.add_argument("--most-gpus", type=int)
    measuring.add_argument("--budget-s", type=float, default=540)
    measuring.add_argument("--kinds-first", action="store_true", help="all fingerprints before any truth")
    measuring.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    measuring.add_argument("--dry-run", action="store_true")
    merging = commands.add_parser("merge")
    merging.set_defaults(run=lambda given: merge(given.into, given.folders))
    merging.add_argument("--into", type=Path, required=True)
    merging.add_argument("folders", type=Path, nargs="+")
    given = parser.parse_args(argv)
    given.run(given)


def rehearse(folder: Path) -> None:
    """The schedule of a tiny model on two GPUs, with processes that stand in for engines; and merging."""
    out, again = folder / "measured", folder / "merged"
    options = "--device cpu --shapes tiny --gpus 2 --kinds truth,fingerprints,variants --tier 3"
    command = ["measure", "--out", str(out), *shlex.split(options)]
    main([*command, "--dry-run"])
    main(command)
    rehearsing.write_result(out / "rehearsal.json", {"measured_by": STAND_IN})
    assert not (out / results.FAILURES).exists(), (out / results.FAILURES).read_text()
    main(["merge", "--into", str(again), str(out)])
    assert results.by_shape(results.merged(Kind.TRUTH, again)).keys() == {"tiny"}
    tasks = chosen(list(Kind), ["tiny"], ["none"], 2, 3)
    assert not results.missing(map(on_cpu, tasks), [again]), "not everything was measured"


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
