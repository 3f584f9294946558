"""Carries out a `MeasureRequest`: each engine run in its own process, which is ended if it exceeds its
limits.

If the engine crashes, only that process dies. It also ends when this process ends, for any reason: it reads a
pipe whose other end closes then.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from profiler.fingerprints.folder import write_fingerprint
from profiler.measurements import Timing, read, to_line
from profiler.profiling_plan import EngineRun
from profiler.types import CPU
from workers.clean_environment import without_secrets
from workers.group import jobs
from workers.group.members import visible_gpus
from workers.measuring.engine_run_job import Job
from workers.measuring.request import MeasureRequest

POLL_S = 0.2
LEAVE_S = 3.0  # the time for an engine that has measured everything to end by itself


class MeasuringError(RuntimeError):
    """A measurement could not be finished; the message has the reason, for the user."""


def carry_out(request: MeasureRequest) -> Iterator[str]:
    """Yield the measurements that are not `known`, as lines, as soon as they are made.

    Raises MeasuringError; lines yielded before it are valid. Closing the iterator ends the running processes.
    """
    request.scratch.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + request.seconds
    with _alone(request.scratch), contextlib.ExitStack() as started:
        measured = _Measured(request)
        yield from measured.fresh()
        lacking = [run for run in request.engine_runs if measured.lacks(run)]
        engines = (started.enter_context(_Engine(request, run, measured, deadline)) for run in lacking)
        engine = next(engines, None)
        while engine:
            engine.begin()
            following = next(engines, None) if _imports_ahead(request) else None
            yield from engine.measurements()
            engine = following or next(engines, None)


def _imports_ahead(request: MeasureRequest) -> bool:
    """Whether the next engine does its imports while one starts, since they take longer.

    On a CPU it would take the cores and the memory of the engine that is measured.
    """
    return request.device_kind != CPU


class _Measured:
    """The file that measuring processes append to, and its lines that were reported."""

    def __init__(self, request: MeasureRequest) -> None:
        self.path = request.scratch / "measurements.jsonl"
        self._reported = set(request.known)
        here = {to_line(m) for m in read(self.path)} if self.path.exists() else set()
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in request.known if line not in here)

    def fresh(self) -> Iterator[str]:
        for measurement in read(self.path):
            line = to_line(measurement)
            if line not in self._reported:
                self._reported.add(line)
                yield line

    def lacks(self, run: EngineRun) -> bool:
        done = {m.point for m in read(self.path) if isinstance(m, Timing) and m.setting == run.setting}
        return not done.issuperset(run.points)


class _Engine:
    """One engine run in a process, which does its imports but touches no device before `begin`."""

    def __init__(self, request: MeasureRequest, run: EngineRun, measured: _Measured, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise _too_late(request)
        self._request, self._run, self._measured, self._deadline = request, run, measured, deadline
        number = request.engine_runs.index(run)
        self._log = request.scratch / f"engine-{number}.log"
        self._barrier = request.scratch / f"begin-{number}"
        self._barrier.unlink(missing_ok=True)
        self._job = _job(request, run, measured.path, left_s, self._barrier)
        self._process = _start(request, self._job, self._log)
        self._ended = False

    def __enter__(self) -> _Engine:
        return self

    def __exit__(self, *of_error: object) -> None:
        self._end()

    def begin(self) -> None:
        self._barrier.touch()

    def measurements(self) -> Iterator[str]:
        """Lines as they are made, until the process has ended. Raises MeasuringError."""
        complete_s = 0.0
        while self._process.poll() is None:
            time.sleep(POLL_S)
            yield from self._measured.fresh()
            if not self._measured.lacks(self._run):
                complete_s = complete_s or time.monotonic()
                if time.monotonic() - complete_s > LEAVE_S:
                    break
            self._check()
        yield from self._measured.fresh()
        if (code := self._process.poll()) and not complete_s:
            ended = f"the engine ended with {jobs.exit_reason(code)}"
            raise MeasuringError(f"{ended}: {jobs.last_words(self._log)}")
        self._end()

    def _check(self) -> None:
        if time.monotonic() > self._deadline:
            raise _too_late(self._request)
        if self._request.device_kind == CPU:
            _check_memory(self._request, self._process)

    def _end(self) -> None:
        """End the process and all its children: they have their own session."""
        if not self._ended:
            self._ended = True
            jobs.end(self._process)
            shutil.rmtree(self._job.folder, ignore_errors=True)


def _job(request: MeasureRequest, run: EngineRun, out: Path, left_s: float, barrier: Path) -> Job:
    """A job with its own files, named like its barrier: two engines may exist at a time."""
    on_cpu = request.device_kind == CPU
    folder = barrier.with_name(f"{barrier.name}-fingerprint")
    shutil.rmtree(folder, ignore_errors=True)  # of another checkpoint of the same shape, or another tokenizer
    return Job(
        folder=write_fingerprint(request.folder, folder, run.setting.layers),
        out=out,
        setting=run.setting,
        points=run.points,
        device_kind="cpu" if on_cpu else "cuda",
        device_bytes=request.device_bytes,
        dtype=request.dtype,
        output_tokens=run.output_tokens,
        seconds=left_s,
        start_barrier=barrier,
        distinct_layers=run.distinct_layers,
        slots=run.slots,
        max_model_len=request.max_model_len,
        graphs=not on_cpu,
        own_process=not on_cpu,  # on a CPU a step takes far longer than a message between processes
    )


def _start(request: MeasureRequest, job: Job, log: Path) -> subprocess.Popen[bytes]:
    job_file = log.with_suffix(".json")
    job_file.write_text(job.model_dump_json())
    environment = without_secrets()
    if request.device_kind != CPU:
        environment |= visible_gpus(request.devices[: job.setting.world_size])
    named = [f"--holder={request.holder}"] if request.holder else []  # the node's agent reads it
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "workers.measuring", str(job_file), "--end-with-stdin", *named],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _too_late(request: MeasureRequest) -> MeasuringError:
    return MeasuringError(
        f"the measurement did not end within {request.seconds:.0f} s; raise OSTINATO_PROFILE_SECONDS"
    )


def _check_memory(request: MeasureRequest, process: subprocess.Popen[bytes]) -> None:
    if (held := _resident_bytes(process.pid)) > request.device_bytes:
        raise MeasuringError(
            f"the measuring engine took {held >> 20} MiB, but may take {request.device_bytes >> 20} MiB; "
            "raise OSTINATO_PROFILE_BYTES, or free device memory"
        )


def _resident_bytes(pid: int) -> int:
    """Memory of a process and its descendants. Shared memory counts for each of them, to be safe."""
    total = 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += int(member.memory_info().rss)
    return total


@contextlib.contextmanager
def _alone(scratch: Path) -> Iterator[None]:
    """Allow one profiling job at a time in a folder. Raises MeasuringError."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(jobs.alone(scratch))
        except jobs.FolderBusy as e:
            raise MeasuringError(f"another process is measuring in {scratch}; try again later") from e
        yield
