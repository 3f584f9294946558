"""The audit log: a line of JSON for each requested change, and for each operation's end.

A line is appended by one write, so several processes may share the file. It never holds a key, and holds
control characters only as JSON's escapes. A full file is renamed, and a new one begins.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from controlplane.repeated_lines import REPEATED, Rarely
from controlplane.settings import Settings
from controlplane.state.records import Operation
from controlplane.state.repository import Change, Put

log = logging.getLogger(__name__)
log.addFilter(Rarely())

STDOUT = "-"
_MODE = 0o600
MAX_FILE_BYTES = 64 << 20
KEPT_FILES = 4  # in addition to the current file


class Counts(Protocol):
    def inc(self) -> None: ...


class AuditLog:
    """`lost` counts lines that could not be written; the requested changes are still made."""

    def __init__(self, settings: Settings, lost: Counts, max_bytes: int = MAX_FILE_BYTES) -> None:
        named = settings.audit_log
        self._path = None if named in ("", STDOUT) else settings.home / named
        self._to_stdout = named == STDOUT
        self._max_bytes = max_bytes
        self._lost = lost
        self._torn = False

    @property
    def on(self) -> bool:
        return self._to_stdout or self._path is not None

    def write(self, entry: dict[str, Any]) -> None:
        """Write a line; blocks while the disk does. Raises nothing."""
        if not self.on:
            return
        try:
            line = (json.dumps({"time": _now(), **entry}) + "\n").encode()
            self._append(line)
        except Exception as e:
            self._lost.inc()
            log.error("lines of the audit log (%s) are lost: %r", self._path or "stdout", e, extra=REPEATED)

    def ends(self, changes: Iterable[Change]) -> None:
        """Log the operations that end with these changes."""
        for change in changes:
            if isinstance(change, Put) and isinstance(change.record, Operation) and change.record.done:
                self.write(_end(change.record))

    def _append(self, line: bytes) -> None:
        """Append a line. Raises OSError, also if only a part fit; the next call then begins a new line."""
        to = 1 if self._path is None else _open(self._path)
        try:
            sent = b"\n" + line if self._torn else line
            self._torn, written = False, os.write(to, sent)
            if written < len(sent):
                self._torn = True
                raise OSError(f"{written} of {len(sent)} bytes were written")
            if self._path is not None and self._max_bytes and os.fstat(to).st_size >= self._max_bytes:
                _rotate(self._path, to)
        finally:
            if self._path is not None:
                os.close(to)


def _rotate(path: Path, full: int) -> None:
    """Rename the `full` file to NAME.1, and each older file to the next number; the oldest is removed. One of
    several processes does this; processes that have the file open still write their lines there. Raises
    OSError."""
    with path.with_name(f"{path.name}.lock").open("a") as lock:
        os.chmod(lock.fileno(), _MODE)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_at(path, full):
            return  # another process was faster
        for number in range(KEPT_FILES - 1, 0, -1):
            with suppress(FileNotFoundError):
                path.with_name(f"{path.name}.{number}").replace(path.with_name(f"{path.name}.{number + 1}"))
        path.replace(path.with_name(f"{path.name}.1"))


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _open(path: Path) -> int:
    """Open the file again for each line: after it was moved away, a new file begins."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags, _MODE)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, _MODE)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _end(operation: Operation) -> dict[str, Any]:
    by = operation.asked_by
    error = (operation.error or {}).get("error", operation.error) or {}
    return {
        "event": "operation_ended",
        "tenant": by.tenant if by else None,
        "role": by.role if by else None,
        "key": by.key if by else None,
        "operation": operation.id,
        "kind": operation.kind,
        "model": operation.target,
        "phase": operation.phase,
        "code": error.get("code"),
    }
