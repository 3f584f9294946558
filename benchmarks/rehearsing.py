"""Rehearsals: a benchmark's own code on tiny shapes and a CPU, so that it still runs on the day it is needed.

A benchmark ends with `run(main, rehearse)`. `python -m benchmarks.NAME --rehearse` calls `rehearse(folder)`
with a temporary folder for all that it writes; one that measures inside an engine is given a tiny one of
vLLM's as well, `rehearse(folder, llm)`, which several can share. What a rehearsal writes says
`"rehearsal": true`: its times mean nothing. tests/benchmarks runs all of them.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

RESULTS = Path(__file__).parent / "results"
FLAG = "--rehearse"
VARIABLE = "OSTINATO_BENCHMARK_REHEARSAL"  # for the processes that a benchmark starts

Main = Callable[[], int | None]
Rehearse = Callable[..., None]


def run(main: Main, rehearse: Rehearse) -> NoReturn:
    """The benchmark, or with `--rehearse` its rehearsal."""
    if FLAG not in sys.argv[1:]:
        raise SystemExit(main())
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as name:
        carry_out(rehearse, Path(name))
    print("rehearsed")
    raise SystemExit(0)


def carry_out(rehearse: Rehearse, folder: Path, llm: Any = None) -> None:
    """With `llm` for a rehearsal that wants an engine; with one of its own if there is none."""
    with rehearsal():
        if not needs_engine(rehearse):
            rehearse(folder)
            return
        if llm is None:
            from benchmarks.rehearsal_engine import start

            llm = start(folder / "engine")
        rehearse(folder, llm)


def needs_engine(rehearse: Rehearse) -> bool:
    return "llm" in inspect.signature(rehearse).parameters


@contextmanager
def rehearsal() -> Iterator[None]:
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def is_rehearsal() -> bool:
    return VARIABLE in os.environ


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help shows the description as it is written."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def machine() -> str:
    """This machine, as results name it."""
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def command(module: str, argv: Sequence[str] | None) -> str:
    """The command of a benchmark's run; without `argv` it read this process's arguments."""
    return f"python -m {module} {shlex.join(sys.argv[1:] if argv is None else argv)}"


def write_result(path: Path, record: dict[str, Any]) -> None:
    """As JSON, whole or not at all. Raises ValueError for a rehearsal that would change what is committed."""
    if is_rehearsal():
        if path.resolve().is_relative_to(RESULTS):
            raise ValueError(f"expected a temporary folder for a rehearsal's result, got {path}")
        record = {"rehearsal": True, **record}
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(path)


def check(path: Path, *keys: str) -> dict[str, Any]:
    """The result that a rehearsal wrote, with at least these keys. Raises AssertionError."""
    record: dict[str, Any] = json.loads(path.read_text())
    assert record["rehearsal"] is True, f"{path.name} does not say that it is a rehearsal's"
    missing = [key for key in keys if not record.get(key)]
    assert not missing, f"expected {', '.join(missing)} in {path.name}, got {sorted(record)}"
    return record
