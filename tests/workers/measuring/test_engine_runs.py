"""A measuring process watched: ended when it takes too long or too much, and with whoever started it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import checkpoints
import psutil
import pytest

from profiler.measurements import Point, Setting, Timing, to_line
from profiler.profiling_plan import EngineRun
from workers.agent import host
from workers.agent.sampling import holder_of
from workers.measuring import engine_runs
from workers.measuring.engine_runs import MeasuringError, carry_out
from workers.measuring.job import Job
from workers.measuring.request import MeasureRequest

SETTING = Setting((2,))
POINTS = (Point(1, 4), Point(2, 4))
LINES = tuple(to_line(Timing(SETTING, point, 4, 0.1, 0.1, 0.01, 0.2)) for point in POINTS)
Start = Callable[[MeasureRequest, Job, Path], subprocess.Popen[bytes]]


@pytest.fixture
def measure_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MeasureRequest:
    monkeypatch.setattr(engine_runs, "POLL_S", 0.02)
    folder = checkpoints.write_model(tmp_path / "model")
    runs = (EngineRun(SETTING, POINTS, 2, 4),)
    scratch = tmp_path / "scratch"
    return MeasureRequest(folder, scratch, runs, (), "cpu", (0,), 1 << 40, "float32", 64, 20.0)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Run this Python in the place of the engine's process; `tell(n)` writes the first n lines."""

    def use(script: str) -> None:
        def start(measure_request: MeasureRequest, job: Job, log: Path) -> subprocess.Popen[bytes]:
            tell = f"tell = lambda n: open({str(job.out)!r}, 'a').writelines(l + '\\n' for l in {LINES}[:n])"
            with log.open("wb") as out:
                return subprocess.Popen(
                    [sys.executable, "-c", f"import os, sys, time\n{tell}\n{script}"],
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


def test_what_is_known_is_not_asked_for_again(
    measure_request: MeasureRequest, engine: Callable[[str], None]
) -> None:
    engine("raise SystemExit('started')")
    assert tuple(carry_out(replace(measure_request, known=LINES))) == ()


def test_an_engine_that_dies_says_why_after_what_it_measured(
    measure_request: MeasureRequest, engine: Callable[[str], None]
) -> None:
    engine("tell(1); raise MemoryError('no room')")
    lines = carry_out(measure_request)
    assert next(lines) == LINES[0]
    with pytest.raises(MeasuringError, match="exit code 1: MemoryError: no room"):
        next(lines)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seconds": 0.3}, "not finished within 0 s; raise OSTINATO_PROFILE_SECONDS"),
        ({"device_bytes": 1 << 20}, "where 1 MiB may be used; raise OSTINATO_PROFILE_BYTES"),
    ],
)
def test_too_long_or_too_much_ends_it(
    measure_request: MeasureRequest,
    engine: Callable[[str], None],
    changes: dict[str, float],
    said: str,
    tmp_path: Path,
) -> None:
    engine(f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(900)")
    began = time.monotonic()
    with pytest.raises(MeasuringError, match=said):
        tuple(carry_out(replace(measure_request, **changes)))  # type: ignore[arg-type]
    assert time.monotonic() - began < 300
    pid = tmp_path / "pid"
    assert not pid.exists() or not pid.read_text() or not psutil.pid_exists(int(pid.read_text()))


def test_closing_ends_it(
    measure_request: MeasureRequest, engine: Callable[[str], None], tmp_path: Path
) -> None:
    engine(f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); tell(1); time.sleep(900)")
    lines = carry_out(measure_request)
    next(lines)
    lines.close()  # type: ignore[attr-defined]
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_the_node_knows_whose_its_process_is(measure_request: MeasureRequest) -> None:
    measure_request.scratch.mkdir()
    named = replace(measure_request, holder="measuring:Llama-2x8_float32.1")
    job = engine_runs._job(named, named.engine_runs[0], measure_request.scratch / "out", 20.0)
    process = engine_runs._start(named, job, measure_request.scratch / "log")
    try:
        assert holder_of(process.pid, host.processes()) == named.holder
    finally:
        engine_runs._end(process)


def test_it_ends_with_whoever_started_it() -> None:
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
