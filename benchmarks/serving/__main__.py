"""See the package; `--help` lists the settings."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import benchmarks.serving as package
from benchmarks.serving.metrics import ratios
from benchmarks.serving.settings import Settings, arguments, parser

GRACE_S = 20  # after an engine's deadline, before its processes are ended
SHARES = {"ours": 0.55, "baseline": 1.0}  # of what is left when its turn comes; ours reads 32 deltas first


def main() -> None:
    options = parser(package.__doc__)
    options.add_argument("--one", help="run this engine here; the other options are its settings")
    options.add_argument("--deadline", type=float)
    given = options.parse_args()
    if given.one:
        from benchmarks.serving.one_engine import OneEngine

        faulthandler.dump_traceback_later(given.deadline - time.time() + GRACE_S / 2, exit=True)
        asyncio.run(OneEngine(Settings.of(given), given.one, given.deadline).run())
        return
    ends = time.time() + given.budget
    kept = _kept(given.out) if given.append else {"commands": [], "rows": []}
    commands = [*kept["commands"], f"python -m benchmarks.serving {' '.join(sys.argv[1:])}"]
    rows = kept["rows"]
    names = given.engines.split(",")
    for name in names:
        share = SHARES[name] if name != names[-1] else 1.0
        for row in _rows_of(name, time.time() + share * (ends - time.time())):
            rows.append(row)
            given.out.write_text(json.dumps(_document(commands, rows), indent=1))
    for ratio in ratios(rows):
        print(json.dumps(ratio))


def _kept(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def _document(commands: list[str], rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"commands": commands, "ratios_ours_to_baseline": ratios(rows), "rows": rows}


def _rows_of(engine: str, deadline: float) -> Iterator[dict[str, Any]]:
    """Run one engine in a process of its own; its lines that are JSON objects are its results."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.serving", *arguments(sys.argv[1:], engine, deadline)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that whatever it starts ends with it
    )
    watch = threading.Timer(max(1.0, deadline - time.time()) + GRACE_S, _end, [process])
    watch.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("{"):
                yield json.loads(line)
    finally:
        watch.cancel()
        _end(process)
        process.wait()


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
