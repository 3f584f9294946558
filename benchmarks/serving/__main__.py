"""See the package; `--help` lists the settings."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import benchmarks.serving as package
from benchmarks import rehearsing
from benchmarks.serving.metrics import highest_rates, ratios
from benchmarks.serving.settings import GRACE_S, Settings, arguments, parser

ENDING_S = 10  # after an engine has told all: then its processes are ended, whatever they still do
SHARES = {
    "ours": 0.55,
    "baseline": 1.0,
}  # of what is left when its turn comes; ours has 32 deltas to read


def main() -> None:
    options = parser(package.__doc__)
    options.add_argument("--one", help="run this engine here; the other options are its settings")
    options.add_argument("--deadline", type=float)
    options.add_argument("--gpus", default="", help="side by side, an engine on each of these GPUs, e.g. 0,1")
    given = options.parse_args()
    if given.one:
        from benchmarks.serving.one_engine import OneEngine

        asyncio.run(OneEngine(Settings.of(given), given.one, given.deadline).run())
        return
    ends = time.time() + given.budget
    kept = _kept(given.out) if given.append else {"commands": [], "rows": []}
    commands = [*kept["commands"], f"python -m benchmarks.serving {' '.join(sys.argv[1:])}"]
    rows = kept["rows"]
    names, gpus = given.engines.split(","), given.gpus.split(",")
    writing = threading.Lock()

    def run(name: str, deadline: float, gpu: str) -> None:
        for row in _rows_of(name, deadline, gpu):
            with writing:
                rows.append(row)
                rehearsing.write_result(given.out, _document(commands, rows))

    if given.gpus:
        with ThreadPoolExecutor() as pool:
            list(pool.map(run, names, [ends] * len(names), gpus))
    else:
        for name in names:
            share = SHARES[name] if name != names[-1] else 1.0
            run(name, time.time() + share * (ends - time.time()), "")
    for told in (*highest_rates(rows), *ratios(rows)):
        print(json.dumps(told))


def _kept(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def _document(commands: list[str], rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "commands": commands,
        "highest_rates": highest_rates(rows),
        "ratios_ours_to_baseline": ratios(rows),
        "rows": rows,
    }


def _rows_of(engine: str, deadline: float, gpu: str) -> Iterator[dict[str, Any]]:
    """Run one engine, on this GPU, in a process of its own; its lines that are JSON objects are its results.

    The run is over when all its processes have ended, and so returned the GPU: no other process holds its
    output.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.serving", *arguments(sys.argv[1:], engine, deadline)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})},
        start_new_session=True,  # so that whatever it starts ends with it
    )
    watch = _end_in(max(1.0, deadline - time.time()) + GRACE_S, process)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            row = json.loads(line) if line.startswith("{") else {}
            if "finished" in row:
                watch.cancel()
                watch = _end_in(ENDING_S, process)
            elif row:
                yield row
    finally:
        watch.cancel()
        _end(process)
        process.wait()


def _end_in(seconds: float, process: subprocess.Popen[str]) -> threading.Timer:
    watch = threading.Timer(seconds, _end, [process])
    watch.start()
    return watch


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def rehearse(folder: Path, llm: Any) -> None:
    """Real deltas of random codes and a case's requests in the engine; both sides' rows from the one."""
    from benchmarks.serving.rehearsal import rows_of

    out = folder / "serving.json"
    rehearsing.write_result(out, _document(["rehearsal"], rows_of(folder, llm)))
    rehearsing.check(out, "rows", "ratios_ours_to_baseline")


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
