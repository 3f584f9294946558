"""Read a tenant's files in a process with limits: the controller's own process parses none of them.

A process is started on demand and answers one request after the other. It is replaced when it was killed, or
after `MAX_READS` answers. Requests and answers are lines of JSON; the process runs `file_reader_process`.
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
IDLE = 1  # processes that stay when there is nothing to read
MAX_READS = 100  # per process


@dataclass
class FileReader:
    """`read` may be called from any number of threads or tasks."""

    limits: ReadLimits = field(default_factory=ReadLimits)
    _idle: list[_Process] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _side_files: SideFilesCheck = field(default_factory=SideFilesCheck)
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(CONCURRENT, "file-reader")
    )

    async def read(self, model: Model, base: Model | None, limits: Limits, convert: Convert) -> Model:
        """As `read_now`. Waits while CONCURRENT other models are read."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.read_now, model, base, limits, convert)

    def read_now(self, model: Model, base: Model | None, limits: Limits, convert: Convert) -> Model:
        """The result or error of `registration.read_model_files`, from a process with limits. Tokenizer and
        chat templates are tried in a second process. Blocking.

        Raises ReaderDied when the process was killed, by its limits or otherwise.
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
        """End the waiting processes."""
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
            process.kill()  # it has ended: release its pipes

    def _give_back(self, process: _Process, answer: Read | Failed) -> None:
        with self._lock:
            if not answer.last and process.reads < MAX_READS and len(self._idle) < IDLE:
                self._idle.append(process)
                return
        process.kill()


@cache
def shared() -> FileReader:
    """This process's reader: a controller that follows another one finds the reader started."""
    reader = FileReader()
    atexit.register(reader.close)
    return reader


class _Process(ChildProcess):
    """A process that reads."""

    def __init__(self) -> None:
        super().__init__(CHILD)
        self.reads = 0

    def ask(self, request: Request, limits: ReadLimits) -> Read | Failed:
        """Send a request and read the answer. Raises ReaderDied; then call `kill`."""
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
