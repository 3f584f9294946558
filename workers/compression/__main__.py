"""`python -m workers.compression REQUEST.json`: compress one fine-tune, and print its progress as lines of
JSON.

The same command continues where a killed process stopped; if all is done, it only repeats the last line. With
`--end-with-stdin` this process ends when its standard input ends. `--holder=NAME`, the last argument, is for
people and programs that look at processes.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import IO

from pydantic import TypeAdapter

from workers.compression.lines import Artifact, Done, Failed, Line, Progress, left_s, to_line
from workers.compression.recipe import CompressRequest
from workers.group import processes

BEAT_S = 5.0  # the longest time between two lines: they show the reader that the process lives
MIN_PAUSE_S = 0.2  # the shortest time between two lines of progress
NICENESS = 10  # engines on the same host have priority
RESULT = "artifact.json"
MAX_FILES = 4096
# the reserved memory is an estimate; the spare part is for libraries and thread stacks
SPARE_FACTOR, SPARE_BYTES = 2, 4 << 30

LASTING = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
DEVICES = ("CUDA", "CUBLAS", "CUDNN", "CUSOLVER", "out of memory", "DefaultCPUAllocator")
"""Words by which a RuntimeError of torch tells that a device, or its memory, failed."""


class Speaker:
    """Writes lines; repeats the last line when there is no new one."""

    def __init__(self, out: IO[str]) -> None:
        self._out, self._lock = out, threading.Lock()
        self._began_s: float | None = None
        self._began_share = 0.0
        self._last = Progress(0.0, "starting")
        self._said_s = 0.0

    def tell(self, share: float, doing: str) -> None:
        """Report progress; not every report is written as a line."""
        now_s = time.monotonic()
        if self._began_s is None:
            self._began_s, self._began_share = now_s, share
        left = left_s(self._began_share, share, now_s - self._began_s)
        self._last = Progress(share, doing, left)
        if now_s - self._said_s >= MIN_PAUSE_S:
            self.say(self._last)

    def say(self, line: Line) -> None:
        with self._lock:
            self._said_s = time.monotonic()
            print(to_line(line), file=self._out, flush=True)

    def beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            if time.monotonic() - self._said_s >= BEAT_S:
                self.say(self._last)


def may_pass(error: BaseException | None) -> bool:
    """Whether another attempt may succeed: memory, disk or a device failed, perhaps as the cause of another
    error.

    Errors about file names and permissions are permanent. So is an OSError without an errno, which does not
    come from the system (transformers raises such errors).
    """
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, LASTING):
            return True
        if isinstance(error, RuntimeError) and any(word in str(error) for word in DEVICES):
            return True
        error = error.__cause__
    return False


def run(request: CompressRequest, speaker: Speaker) -> Line:
    """Compress; returns the final line.

    Raises errors that may pass. This process then ends without a final line, and is started again.
    """
    result = request.folder / RESULT
    if result.exists() and request.artifact.is_dir():
        return Done(TypeAdapter(Artifact).validate_json(result.read_bytes()))
    try:
        from workers.compression.durable import write_bytes  # here, as importing torch takes seconds
        from workers.compression.from_recipe import artifact_of

        artifact = artifact_of(request, speaker.tell)
    except Exception as error:
        if may_pass(error):
            raise
        traceback.print_exc()
        known = isinstance(error, ValueError | OSError)
        return Failed(str(error) or repr(error) if known else f"an unexpected error: {error!r}")
    write_bytes(result, TypeAdapter(Artifact).dump_json(artifact))
    return Done(artifact)


def _limit(request: CompressRequest) -> None:
    """Limit this process's share of the node.

    A GPU's driver maps memory that it never uses, so on a GPU only a tokenizer's memory is limited
    (`workers.limited`).
    """
    bounds = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: MAX_FILES}
    if request.memory_bytes and request.device == "cpu":
        bounds[resource.RLIMIT_DATA] = SPARE_BYTES + SPARE_FACTOR * request.memory_bytes
    for kind, value in bounds.items():
        hard = resource.getrlimit(kind)[1]
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (allowed, allowed))


def main() -> None:
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries' output must not mix with these lines
    if "--end-with-stdin" in sys.argv[2:]:
        processes.end_with_stdin()
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    request = TypeAdapter(CompressRequest).validate_json(Path(sys.argv[1]).read_bytes())
    _limit(request)
    speaker = Speaker(lines)
    threading.Thread(target=speaker.beat, daemon=True).start()
    speaker.tell(0.0, "starting")
    speaker.say(run(request, speaker))
    lines.flush()


if __name__ == "__main__":
    main()
