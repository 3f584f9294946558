"""The process that reads a tenant's files, one request after the other, each within limits.

The process ends with its input: when its parent process has ended for any reason.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import resource
import sys
import threading
from pathlib import Path

from pydantic import TypeAdapter

from controlplane import errors
from controlplane.controller import registration
from controlplane.controller.reading import MIB, Failed, Growing, Line, Read, ReadLimits, Request
from profiler.inside import confine

log = logging.getLogger(__name__)
REQUESTS: TypeAdapter[tuple[Request, ReadLimits]] = TypeAdapter(tuple[Request, ReadLimits])
LINES: TypeAdapter[Line] = TypeAdapter(Line)


def main() -> None:
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        request, limits = REQUESTS.validate_json(requests.get())
        answer = _answer(request, limits)
        _say(answer)
        if not isinstance(answer, Growing) and answer.last:
            return


def _listen(requests: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        requests.put(line)
    os._exit(0)


def _answer(request: Request, limits: ReadLimits) -> Line:
    allowed = _limit(limits)
    base = request.base.path if request.base is not None else None
    others = [Path(folder).resolve() for folder in (request.bundled, base) if folder]
    confine((*request.limits.roots, *others))

    def growing(more_bytes: int) -> None:
        nonlocal allowed
        allowed += limits.cpu_s_for(more_bytes)
        _limit_cpu(allowed)
        _say(Growing(more_bytes))

    try:
        return Read(
            registration.read_model_files(
                request.model, request.base, request.limits, lambda _: Path(request.bundled), growing
            )
        )
    except MemoryError:
        _lift()
        return Failed(_too_much_memory(request, limits).body(), last=True)
    except errors.OstinatoError as e:
        return Failed(e.body())
    except Exception as e:
        _lift()
        log.exception("reading '%s' failed", request.model.name)
        return Failed(registration.unexpected(e).body(), last=True)


def _too_much_memory(request: Request, limits: ReadLimits) -> errors.OstinatoError:
    model = request.model
    return errors.SourceUnreadable(
        f"reading the headers and configs of '{model.adapter or model.source}' takes more than the allowed "
        f"{limits.memory_bytes // MIB} MiB of memory; save the files again with save_pretrained",
        param="adapter" if model.is_variant else "source",
    )


def _limit(limits: ReadLimits) -> float:
    """Set the limits; returns the CPU time of this process at which it is killed."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    allowed = used.ru_utime + used.ru_stime + limits.cpu_s
    _limit_cpu(allowed)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _soft(resource.RLIMIT_AS, pages * resource.getpagesize() + limits.memory_bytes)
    _soft(resource.RLIMIT_NOFILE, limits.files)
    return allowed


def _limit_cpu(seconds: float) -> None:
    _soft(resource.RLIMIT_CPU, math.ceil(seconds))


def _lift() -> None:
    """Lift the memory limit: only our own code runs from here on."""
    _soft(resource.RLIMIT_AS, resource.RLIM_INFINITY)


def _soft(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    allowed = value if hard == resource.RLIM_INFINITY else hard if value < 0 else min(value, hard)
    resource.setrlimit(kind, (allowed, hard))


def _say(line: Line) -> None:
    sys.stdout.buffer.write(LINES.dump_json(line) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
