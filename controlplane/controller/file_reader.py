"""Reads what a tenant named in a process with limits: the controller's interpreter parses none of it.

A process is started when one is needed, answers one request after the other, and is replaced when it was
killed, or has answered `MAX_READS`. Requests and answers are lines of JSON; `file_reader_process` is what
runs there.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter

from controlplane import errors
from controlplane.controller import sources
from controlplane.controller.reading import Failed, Growing, Line, Read, ReadLimits, Request
from controlplane.controller.registration import Convert, Limits
from controlplane.state.records import Model

CHILD = "controlplane.controller.file_reader_process"
CONCURRENT = 4  # processes at once; further requests wait
IDLE = 1  # that stay when nothing is to be read
MAX_READS = 100  # of one process
MAX_ANSWER_BYTES = 16 << 20
READ_BYTES = 1 << 16
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "PYTHONDONTWRITEBYTECODE")


class ReaderDied(Exception):
    """The process that read was killed or ended before it had answered. The message says how."""


@dataclass
class FileReader:
    """`read` from as many threads or tasks as there are."""

    limits: ReadLimits = field(default_factory=ReadLimits)
    _idle: list[_Process] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(CONCURRENT, "file-reader")
    )

    async def read(self, model: Model, base: Model | None, limits: Limits, convert: Convert) -> Model:
        """As `read_now`. Waits while CONCURRENT others are read."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.read_now, model, base, limits, convert)

    def read_now(self, model: Model, base: Model | None, limits: Limits, convert: Convert) -> Model:
        """What `registration.read_model_files` returns or raises, from a process with limits. Blocking.

        Raises ReaderDied when that was killed, by its limits or by somebody.
        """
        bundled = sources.bundled_name(model.source or "")
        request = Request(model, base, limits, str(convert(bundled)) if bundled else "")
        process = self._take()
        try:
            answer = process.ask(request, self.limits)
        except BaseException:
            process.kill()
            raise
        self._give_back(process, answer)
        if isinstance(answer, Failed):
            raise errors.error_from_body(answer.body)
        return answer.model

    def close(self) -> None:
        """End the processes that wait."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.kill()

    def _take(self) -> _Process:
        while True:
            with self._lock:
                if not self._idle:
                    return _Process()
                process = self._idle.pop()
            if process.alive:
                return process
            process.kill()  # its end is not what is read next

    def _give_back(self, process: _Process, answer: Read | Failed) -> None:
        with self._lock:
            if not answer.last and process.reads < MAX_READS and len(self._idle) < IDLE:
                self._idle.append(process)
                return
        process.kill()


@cache
def shared() -> FileReader:
    """The one of this process: a controller that follows another finds its reader warm."""
    reader = FileReader()
    atexit.register(reader.close)
    return reader


class _Process:
    """One process that reads. It ends with this one, whatever happens: its input is closed then."""

    def __init__(self) -> None:
        self.reads = 0
        self._kept = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", CHILD],
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: Request, limits: ReadLimits) -> Read | Failed:
        """Raises ReaderDied; `kill` it then."""
        self.reads += 1
        ends_s = time.monotonic() + limits.wall_s
        self._send(_requests().dump_json((request, limits)) + b"\n")
        while True:
            match _answers().validate_json(self._line(ends_s)):
                case Growing(more_bytes=count):
                    ends_s += limits.wall_s_for(count)
                case answer:
                    return answer

    def kill(self) -> None:
        """Waits for its end, and closes its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:  # what was not written yet cannot be any more
                continue

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except OSError as e:
            raise ReaderDied(self._ending()) from e

    def _line(self, ends_s: float) -> bytes:
        assert self._process.stdout is not None
        out = self._process.stdout.fileno()
        while b"\n" not in self._kept:
            left_s = ends_s - time.monotonic()
            if left_s <= 0 or not _is_readable(out, left_s):
                raise ReaderDied("it took longer than allowed, and was killed")
            part = os.read(out, READ_BYTES)
            if not part:
                raise ReaderDied(self._ending())
            self._kept += part
            if len(self._kept) > MAX_ANSWER_BYTES:
                raise ReaderDied(f"it answered with more than {MAX_ANSWER_BYTES} bytes, and was killed")
        line, _, self._kept = self._kept.partition(b"\n")
        return line

    def _ending(self) -> str:
        code = self._process.wait()
        if code == -signal.SIGXCPU:
            return "it used more CPU time than allowed, and was killed"
        return f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with code {code}"


def _is_readable(descriptor: int, timeout_s: float) -> bool:
    """Within this time. (`select.select` takes no number above 1023.)"""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(1000 * timeout_s))


def _environment() -> dict[str, str]:
    """Where our code is, and no secrets; one thread is enough."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    ours = str(Path(__file__).parents[2])
    return kept | {"PYTHONPATH": ours, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


@cache
def _requests() -> TypeAdapter[tuple[Request, ReadLimits]]:
    return TypeAdapter(tuple[Request, ReadLimits])


@cache
def _answers() -> TypeAdapter[Line]:
    return TypeAdapter(Line)
