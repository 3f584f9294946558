"""Reads what a tenant named in a process with limits: the controller's interpreter parses none of it.

A process is started when one is needed, answers one request after the other, and is replaced when it was
killed, or has answered `MAX_READS`. Requests and answers are lines of JSON; `file_reader_process` is what
runs there.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache

from pydantic import TypeAdapter

from controlplane import errors
from controlplane.controller import sources
from controlplane.controller.child_process import ChildProcess
from controlplane.controller.reading import Failed, Growing, Line, Read, ReadLimits, Request
from controlplane.controller.registration import Convert, Limits
from controlplane.controller.side_files_check import SideFilesCheck
from controlplane.state.records import Model

CHILD = "controlplane.controller.file_reader_process"
CONCURRENT = 4  # processes at once; further requests wait
IDLE = 1  # that stay when nothing is to be read
MAX_READS = 100  # of one process


@dataclass
class FileReader:
    """`read` from as many threads or tasks as there are."""

    limits: ReadLimits = field(default_factory=ReadLimits)
    _idle: list[_Process] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _side_files: SideFilesCheck = field(default_factory=SideFilesCheck)
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(CONCURRENT, "file-reader")
    )

    async def read(self, model: Model, base: Model | None, limits: Limits, convert: Convert) -> Model:
        """As `read_now`. Waits while CONCURRENT others are read."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.read_now, model, base, limits, convert)

    def read_now(self, model: Model, base: Model | None, limits: Limits, convert: Convert) -> Model:
        """What `registration.read_model_files` returns or raises, from a process with limits, with the
        tokenizer and chat templates tried in a second one. Blocking.

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
        return self._side_files.check(answer.model, base, limits)

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


class _Process(ChildProcess):
    """A process that reads."""

    def __init__(self) -> None:
        super().__init__(CHILD)
        self.reads = 0

    def ask(self, request: Request, limits: ReadLimits) -> Read | Failed:
        """Raises ReaderDied; `kill` it then."""
        self.reads += 1
        ends_s = time.monotonic() + limits.wall_s
        self.send(_requests().dump_json((request, limits)))
        while True:
            match _answers().validate_json(self.line(ends_s)):
                case Growing(more_bytes=count):
                    ends_s += limits.wall_s_for(count)
                case answer:
                    return answer


@cache
def _requests() -> TypeAdapter[tuple[Request, ReadLimits]]:
    return TypeAdapter(tuple[Request, ReadLimits])


@cache
def _answers() -> TypeAdapter[Line]:
    return TypeAdapter(Line)
