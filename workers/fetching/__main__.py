"""The process that fetches: a request on standard input, lines on standard output.

It ends with its input, so it never outlives the process that asked. What it reads comes from servers that a
tenant chose, so its memory is bounded, and it holds no secret but the credentials of that tenant's sources.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import sys
import threading
import time
import traceback

from workers.fetching.fetch import fetch
from workers.fetching.messages import (
    LINES,
    NO_SPACE,
    REQUESTS,
    UNREADABLE,
    Failed,
    FetchError,
    Line,
    Progress,
)

MEMORY_BYTES = 4 << 30  # of private memory
FILES = 256
TELL_EVERY_S = 0.5


def main() -> None:
    line = sys.stdin.buffer.readline()
    threading.Thread(target=_end_with_input, daemon=True).start()
    logging.disable()  # libraries log URLs, which may be signed
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_DATA, MEMORY_BYTES)
    _limit(resource.RLIMIT_NOFILE, FILES)
    try:
        _say(fetch(REQUESTS.validate_json(line), _Teller()))
    except FetchError as e:
        _say(Failed(e.code, e.message))
    except MemoryError:
        _say(Failed(UNREADABLE, "the files' names and configs take too much memory; check the source"))
    except OSError as e:
        code = NO_SPACE if e.errno in (errno.ENOSPC, errno.EDQUOT) else UNREADABLE
        _say(
            Failed(
                code,
                f"the fetched files cannot be written: {os.strerror(e.errno or 0)}; check the node's disk",
            )
        )
    except Exception as e:  # its text may quote headers
        where = traceback.extract_tb(e.__traceback__)[-1]
        _say(
            Failed(
                "internal_error",
                f"an unexpected error in a fetch: {type(e).__name__} in {where.name}, line {where.lineno}",
            )
        )


class _Teller:
    """Passes progress on, at most twice a second unless it has a note."""

    def __init__(self) -> None:
        self._told_s = float("-inf")

    def __call__(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if progress.note or now_s - self._told_s >= TELL_EVERY_S:
            self._told_s = now_s
            _say(progress)


def _say(line: Line) -> None:
    sys.stdout.buffer.write(LINES.dump_json(line) + b"\n")
    sys.stdout.buffer.flush()


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    main()
