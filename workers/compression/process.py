"""Carries out a `CompressRequest` in its own process, which ends when this process ends, for any reason."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from pydantic import TypeAdapter

from workers.clean_environment import clean_environment
from workers.compression.lines import Done, Failed, from_line
from workers.compression.recipe import CompressRequest
from workers.group import jobs
from workers.group.members import visible_gpus

SILENT_S = 300.0  # a process writes every few seconds; after this silence it counts as hung
LOG = "compress.log"


class CompressingError(RuntimeError):
    """A process was interrupted; a restart continues its work. The message has the cause."""


def carry_out(request: CompressRequest) -> Iterator[str]:
    """Yield lines (workers.compression.lines) as they come; the last line is Done or Failed.

    Closing the iterator ends the process. Raises CompressingError if the process ends without such a line.
    """
    request.folder.mkdir(parents=True, exist_ok=True)
    try:
        with jobs.alone(request.folder) as lock:
            yield from _run(request, lock)
    except jobs.FolderBusy as e:
        raise CompressingError(f"another process is compressing in {request.folder}") from e


def _run(request: CompressRequest, lock: int) -> Iterator[str]:
    log = request.folder / LOG
    process = _start(request, log, lock)
    try:
        assert process.stdout is not None
        ended = False
        for line in _lines(process.stdout):
            yield line
            ended = isinstance(from_line(line), Done | Failed)
            if ended:
                return
        code = process.wait()
        raise CompressingError(
            f"the compression's process ended with {jobs.exit_reason(code)}: {jobs.last_words(log)}"
        )
    finally:
        jobs.end(process)
        if process.stdout is not None:
            process.stdout.close()


def _start(request: CompressRequest, log: Path, lock: int) -> subprocess.Popen[bytes]:
    """Start the process. It holds the folder's lock, too: no other process begins there before it has
    ended.
    """
    job = request.folder / "request.json"
    job.write_bytes(TypeAdapter(CompressRequest).dump_json(request))
    named = [f"--holder={request.holder}"] if request.holder else []  # the node's agent reads it
    with log.open("ab") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "workers.compression", str(job), "--end-with-stdin", *named],
            env=clean_environment() | (visible_gpus(request.gpus) if request.gpus else {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            pass_fds=(lock,),
        )


def _lines(out: IO[bytes]) -> Iterator[str]:
    """Whole lines until the end. Raises CompressingError if no line comes for SILENT_S."""
    kept = b""
    with selectors.DefaultSelector() as selector:
        selector.register(out, selectors.EVENT_READ)
        while True:
            if not selector.select(SILENT_S):
                raise CompressingError(
                    f"the compression's process reported nothing for {SILENT_S:.0f} s and was stopped"
                )
            part = os.read(out.fileno(), 65536)
            if not part:
                return
            *whole, kept = (kept + part).split(b"\n")
            yield from (line.decode() for line in whole)
