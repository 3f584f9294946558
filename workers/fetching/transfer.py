"""The bytes of one file: resumed after a kill, repeated after failures, checked by digest."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from workers.fetching.folder import part_of, size_of
from workers.fetching.messages import UNREACHABLE, WRONG_DIGEST, FetchError, FetchRules, Interrupted
from workers.fetching.remotes.interface import Remote, RemoteFile

T = TypeVar("T")

MAX_PAUSE_S = 60.0
READ_BYTES = 1 << 20

Say = Callable[[int, str], None]  # how many bytes are there, and a note


class _Digests:
    """Every digest that may be compared, computed as the bytes come."""

    def __init__(self, size_bytes: int) -> None:
        self.sha256 = hashlib.sha256()
        self.md5 = hashlib.md5(usedforsecurity=False)
        # git's name of a file's contents
        self.git_sha1 = hashlib.sha1(b"blob %d\0" % size_bytes, usedforsecurity=False)

    def update(self, data: bytes) -> None:
        for digest in (self.sha256, self.md5, self.git_sha1):
            digest.update(data)

    def mismatch(self, file: RemoteFile) -> str:
        """The digest that is not the expected one; empty if there is none."""
        for name in ("sha256", "git_sha1", "md5"):
            expected, digest = getattr(file, name), getattr(self, name)
            if expected and digest.hexdigest() != expected:
                return f"expected {name} {expected}, got {digest.hexdigest()}"
        return ""


def retried(
    action: Callable[[], T], rules: FetchRules, say: Callable[[str], None], progress: Callable[[], int]
) -> T:
    """The result of an action that may be interrupted. Failures count while `progress` does not grow.

    Errors: FetchError (UNREACHABLE after too many failures in a row).
    """
    failures, reached = 0, progress()
    while True:
        try:
            return action()
        except Interrupted as e:
            now = progress()
            failures, reached = (1 if now > reached else failures + 1), max(now, reached)
            if failures > rules.retries:
                raise FetchError(
                    UNREACHABLE, f"{failures} attempts failed (the last one: {e}); try again when it answers"
                ) from e
            pause_s = min(rules.pause_s * 2.0 ** (failures - 1), MAX_PAUSE_S)
            say(f"{e}; the fetch continues in {pause_s:.0f} s")
            time.sleep(pause_s)


def transfer(remote: Remote, file: RemoteFile, folder: Path, rules: FetchRules, say: Say) -> str:
    """Put the file into its place; returns its SHA-256. Errors: FetchError, OSError."""
    part = part_of(folder, file.name)
    part.parent.mkdir(parents=True, exist_ok=True)
    problem = ""
    for _ in range(2):  # a part that a crash damaged is fetched again from its beginning
        digests = retried(
            lambda: _rest(remote, file, part, say),
            rules,
            lambda note: say(size_of(part), note),
            lambda: size_of(part),
        )
        problem = digests.mismatch(file)
        if not problem:
            target = folder / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            part.rename(target)
            return digests.sha256.hexdigest()
        part.unlink()
    raise FetchError(
        WRONG_DIGEST, f"{file.name}: {problem}, twice; the file is damaged at its source, or on the way"
    )


def _rest(remote: Remote, file: RemoteFile, part: Path, say: Say) -> _Digests:
    """Fetch what a part lacks. Errors: Interrupted when the bytes end early."""
    with part.open("ab+") as out:
        if out.tell() > file.size_bytes:
            out.truncate(0)
        digests = _digests_of(part, file)
        count = size_of(part)
        if count < file.size_bytes:
            with remote.read(file, count) as (start, parts):
                if start != count:  # the server sends the whole file
                    out.truncate(0)
                    count, digests = 0, _Digests(file.size_bytes)
                for data in parts:
                    count += len(data)
                    if count > file.size_bytes:
                        raise _longer(file)
                    digests.update(data)
                    out.write(data)
                    out.flush()
                    say(count, "")
        if count < file.size_bytes:
            raise Interrupted(f"{file.name} ended after {count} of {file.size_bytes} bytes")
        os.fsync(out.fileno())
    return digests


def _longer(file: RemoteFile) -> FetchError:
    return FetchError(
        WRONG_DIGEST, f"{file.name} has more than its {file.size_bytes} bytes; it changed at its source"
    )


def _digests_of(part: Path, file: RemoteFile) -> _Digests:
    digests = _Digests(file.size_bytes)
    with part.open("rb") as data:
        while chunk := data.read(READ_BYTES):
            digests.update(chunk)
    return digests
