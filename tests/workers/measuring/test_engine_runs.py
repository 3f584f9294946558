"""A measuring process under watch: ended when it takes too long or too much, and with its parent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from profiler.measurements import Point, Setting, Timing, to_line
from profiler.profiling_plan import EngineRun
from testkit import checkpoints
from workers.agent import host
from workers.agent.sampling import holder_of
from workers.group import jobs
from workers.measuring import engine_runs
from workers.measuring.engine_run_job import Job
from workers.measuring.engine_runs import MeasuringError, carry_out
from workers.measuring.request import MeasureRequest

SETTING = Setting((2,))
POINTS = (Point(1, 4), Point(2, 4))
SHALLOW = Setting((1,))


def lines_of(setting: Setting) -> tuple[str, ...]:
    return tuple(to_line(Timing(setting, point, 4, 0.1, 0.1, 0.01, 0.2)) for point in POINTS)


LINES = lines_of(SETTING)
IMPORTING = """
def say(what):
    with open(said, 'a') as file: file.write(f'{job} {what}\\n')
def wait_for(line):
    while line not in open(said).read(): time.sleep(0.01)
say('imports')
"""
BEGINNING = """
while not os.path.exists(barrier): time.sleep(0.01)
say('begins')
"""


@pytest.fixture
def measure_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MeasureRequest:
    monkeypatch.setattr(engine_runs, "POLL_S", 0.02)
    monkeypatch.setattr(engine_runs, "LEAVE_S", 600.0)
    folder = checkpoints.write_model(tmp_path / "model")
    runs = (EngineRun(SETTING, POINTS, 2, 4),)
    scratch = tmp_path / "scratch"
    return MeasureRequest(folder, scratch, runs, (), "cpu", (0,), 1 << 40, "float32", 64, 20.0)


@pytest.fixture
def said(tmp_path: Path) -> Path:
    """The output of processes in the place of engines."""
    return tmp_path / "said"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, said: Path) -> Callable[[str], None]:
    """Run this Python in the place of the engine's process; `tell(n)` writes the first n lines."""

    def use(script: str) -> None:
        def start(measure_request: MeasureRequest, job: Job, log: Path) -> subprocess.Popen[bytes]:
            lines = lines_of(job.setting)
            tell = f"tell = lambda n: open({str(job.out)!r}, 'a').writelines(l + '\\n' for l in {lines}[:n])"
            barrier = f"job, barrier, said = {log.stem!r}, {str(job.start_barrier)!r}, {str(said)!r}"
            with log.open("wb") as out:
                return subprocess.Popen(
                    [sys.executable, "-c", f"import os, sys, time\n{tell}\n{barrier}\n{script}"],
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

        monkeypatch.setattr(engine_runs, "_start", start)

    return use


def test_lines_come_as_they_are_measured(
    measure_request: MeasureRequest, engine: Callable[[str], None]
) -> None:
    engine("tell(2)")
    assert tuple(carry_out(measure_request)) == LINES
    assert tuple(carry_out(measure_request)) == LINES  # kept on the node: an engine is not even started
    assert tuple(carry_out(replace(measure_request, known=LINES[:1]))) == LINES[1:]


def test_known_measurements_are_not_requested_again(
    measure_request: MeasureRequest, engine: Callable[[str], None]
) -> None:
    engine("raise SystemExit('started')")
    assert tuple(carry_out(replace(measure_request, known=LINES))) == ()


def test_a_dying_engine_s_reason_follows_its_measurements(
    measure_request: MeasureRequest, engine: Callable[[str], None]
) -> None:
    engine("tell(1); raise MemoryError('no room')")
    lines = carry_out(measure_request)
    assert next(lines) == LINES[0]
    with pytest.raises(MeasuringError, match="exit code 1: MemoryError: no room"):
        next(lines)


def on_gpus(measure_request: MeasureRequest) -> MeasureRequest:
    runs = (*measure_request.engine_runs, EngineRun(SHALLOW, POINTS, 1, 4))
    return replace(measure_request, device_kind="cuda", engine_runs=runs)


def test_the_next_engine_imports_while_one_starts_and_begins_when_it_has_ended(
    measure_request: MeasureRequest, engine: Callable[[str], None], said: Path
) -> None:
    measuring = "tell(2); say('ends')"
    engine(IMPORTING + BEGINNING + "if job == 'engine-0': wait_for('engine-1 imports')\n" + measuring)
    assert tuple(carry_out(on_gpus(measure_request))) == LINES + lines_of(SHALLOW)
    order = said.read_text().splitlines()
    assert order.index("engine-1 imports") < order.index("engine-0 ends") < order.index("engine-1 begins")


def test_on_a_cpu_one_engine_is_there_at_a_time(
    measure_request: MeasureRequest, engine: Callable[[str], None], said: Path
) -> None:
    engine(IMPORTING + BEGINNING + "tell(2); say('ends')")
    request = replace(on_gpus(measure_request), device_kind="cpu")
    assert tuple(carry_out(request)) == LINES + lines_of(SHALLOW)
    words = [line.split() for line in said.read_text().splitlines()]
    assert words == [[f"engine-{n}", did] for n in (0, 1) for did in ("imports", "begins", "ends")]


def test_an_engine_that_has_measured_everything_need_not_end_by_itself(
    measure_request: MeasureRequest, engine: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_runs, "LEAVE_S", 0.1)
    engine("tell(2); time.sleep(900)")
    assert tuple(carry_out(replace(measure_request, seconds=600.0))) == LINES


def test_the_engine_that_imports_ends_with_the_one_that_failed(
    measure_request: MeasureRequest, engine: Callable[[str], None], tmp_path: Path
) -> None:
    pid = str(tmp_path / "pid")
    engine(
        IMPORTING
        + f"if job == 'engine-1': open({pid!r}, 'w').write(str(os.getpid()))\n"
        + "if job == 'engine-1': say('is there'); time.sleep(900)\n"
        + BEGINNING
        + "wait_for('engine-1 is there'); raise MemoryError('no room')"
    )
    with pytest.raises(MeasuringError, match="MemoryError: no room"):
        tuple(carry_out(on_gpus(measure_request)))
    assert not psutil.pid_exists(int(Path(pid).read_text()))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"seconds": 0.3}, "did not end within 0 s; raise OSTINATO_PROFILE_SECONDS"),
        ({"device_bytes": 1 << 20}, "but may take 1 MiB; raise OSTINATO_PROFILE_BYTES"),
    ],
)
def test_too_much_time_or_output_ends_the_run(
    measure_request: MeasureRequest,
    engine: Callable[[str], None],
    changes: dict[str, float],
    error: str,
    tmp_path: Path,
) -> None:
    engine(f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(900)")
    with pytest.raises(MeasuringError, match=error):
        tuple(carry_out(replace(measure_request, **changes)))  # type: ignore[arg-type]
    pid = tmp_path / "pid"
    assert not pid.exists() or not pid.read_text() or not psutil.pid_exists(int(pid.read_text()))


def test_closing_ends_the_run(
    measure_request: MeasureRequest, engine: Callable[[str], None], tmp_path: Path
) -> None:
    engine(f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); tell(1); time.sleep(900)")
    lines = carry_out(measure_request)
    next(lines)
    lines.close()  # type: ignore[attr-defined]
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_the_node_knows_the_holder_of_its_process(measure_request: MeasureRequest) -> None:
    measure_request.scratch.mkdir()
    named = replace(measure_request, holder="measuring:Llama-2x8_float32.1")
    scratch = measure_request.scratch
    job = engine_runs._job(named, named.engine_runs[0], scratch / "out", 20.0, scratch / "begin")
    process = engine_runs._start(named, job, measure_request.scratch / "log")
    try:
        # When Popen returns, the kernel may not have put the command line in its place yet.
        deadline = time.monotonic() + 60
        while (found := holder_of(process.pid, host.processes())) != named.holder:
            assert time.monotonic() < deadline, found
    finally:
        jobs.end(process)


def test_the_process_ends_with_its_parent() -> None:
    """However that ended: the other end of its standard input closes."""
    script = (
        "import time; from workers.group.processes import end_with_stdin; end_with_stdin();"
        "print('on', flush=True); time.sleep(900)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": "."},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == b"on\n"
    process.stdin.close()
    assert process.wait(60) == -9
    process.stdout.close()
