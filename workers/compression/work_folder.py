"""The hidden folder next to the target in which a job keeps finished parts, so that it can continue.

    .OUT.compressing/lock        held while a process works
                     job.json    what is compressed, and how
                     checked.json, records/*.json   the results of checks, and the finished parts
                     artefact/   becomes OUT
                     result.json the job is done except for renaming
                     tried/      candidates, each by a job of its own (run.py)

A record is written after its file, and each file appears as a whole; so a part with a record is finished.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from profiler.errors import CheckpointError
from profiler.files import is_file, read_json
from profiler.variants.verifying import read_file
from workers.compression.durable import rename, write_json
from workers.compression.records import PartRecord, part_record

LOCK, JOB, CHECKED, RECORDS, ARTEFACT, RESULT = (
    "lock", "job.json", "checked.json", "records", "artefact", "result.json",
)  # fmt: skip
FINISHED = (f"{RECORDS}/*.json", "tried/*.json", f"tried/.*/{RECORDS}/*.json")
ATTEMPTS = 5


class OtherWork(CheckpointError):
    """The folder belongs to another job, whose work would be lost. The message has the differences."""


class WorkFolder:
    """One job's folder, locked. All methods raise OSError if the disk fails."""

    def __init__(self, out: Path, path: Path) -> None:
        self.out, self.path = out, path
        self.artefact = path / ARTEFACT

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """Start or continue the job with these inputs. Work with other inputs is removed.

        Raises OtherWork if that work has finished parts.
        """
        there, wanted = self.note(JOB), json.loads(json.dumps(inputs))
        if there is not None and there != wanted:
            self._require_idle(there, wanted)
        if there != wanted:
            self.empty()
        self.artefact.mkdir(exist_ok=True)
        (self.path / RECORDS).mkdir(exist_ok=True)
        if there != wanted:
            write_json(self.path / JOB, wanted, indent=1)

    def note(self, name: str) -> dict[str, Any] | None:
        """A document written before, if there is one."""
        return read_json(self.path / name) if is_file(self.path / name) else None

    def write_note(self, name: str, document: Mapping[str, Any]) -> None:
        write_json(self.path / name, document)

    def finished(self, part: str) -> PartRecord | None:
        """The record of a part whose file is unchanged."""
        raw = self.note(f"{RECORDS}/{part}.json")
        if raw is None:
            return None
        record = part_record(raw)
        try:
            if record.file is not None:
                read_file(self.artefact, record.file)
        except CheckpointError:
            return None  # damaged since: it is made again
        return record

    def finish(self, part: str, record: PartRecord) -> None:
        write_json(self.path / RECORDS / f"{part}.json", record.as_json())

    @property
    def has_parts(self) -> bool:
        """Whether anything is finished, here or by a job for a candidate (run.py)."""
        return any(any(self.path.glob(kept)) for kept in FINISHED)

    def earlier(self) -> dict[str, Any] | None:
        """The result of a job that is done except for renaming; None if its artefact has been removed
        since.
        """
        document = self.note(RESULT)
        if document is None or self.out.exists():
            return document
        if not any(self.artefact.iterdir()):
            (self.path / RESULT).unlink()
            return None
        self.publish(document)
        return document

    def sweep(self, files: Collection[str]) -> None:
        """Remove files of the artefact that are not in `files`, left by a killed job."""
        for path in self.artefact.iterdir():
            if path.name not in files:
                path.unlink()

    def publish(self, result: Mapping[str, Any]) -> None:
        """Give the artefact its final name. Once `result` is written, a restarted job is done at once."""
        write_json(self.path / RESULT, result)
        rename(self.artefact, self.out)

    def empty(self) -> None:
        """Remove all but the lock. The job's description goes first: after a kill the folder belongs to no
        job.
        """
        for name in (RESULT, JOB):
            (self.path / name).unlink(missing_ok=True)
        self._remove_all_but(LOCK)

    def discard(self) -> None:
        """Remove the folder; the result goes last, so that it survives a kill."""
        last = (RESULT, JOB, LOCK)
        self._remove_all_but(*last)
        for name in last:
            (self.path / name).unlink(missing_ok=True)
        with suppress(OSError):  # the next process has put its lock there already
            self.path.rmdir()

    def _remove_all_but(self, *names: str) -> None:
        for path in list(self.path.iterdir()):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in names:
                path.unlink()

    def _require_idle(self, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        """Raises OtherWork unless the other job in this folder has nothing to lose."""
        if self.out.exists():
            raise OtherWork(
                f"the folder {self.out} exists already; choose another folder, or remove this folder first"
            )
        if not self.has_parts:
            return
        lies = ", ".join(
            f"{key} {_short(there, key)} (now {_short(wanted, key)})"
            for key in {**there, **wanted}
            if there.get(key) != wanted.get(key)
        )
        raise OtherWork(
            f"{self.path} holds an unfinished compression into {self.out.name} with {lies}; run that command "
            f"again to finish it, choose another folder, or remove {self.path}"
        )


def path_for(out: Path) -> Path:
    """The path of the work folder for `out`."""
    return out.parent / f".{out.name}.compressing"


@contextmanager
def work_folder(out: Path) -> Iterator[WorkFolder]:
    """The folder for `out`, for this process alone. It stays if the work is not finished.

    Raises CheckpointError if another process works on `out`, or the disk fails.
    """
    path = path_for(out)
    try:
        with _locked(path, out):
            yield WorkFolder(out, path)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {error.filename or out}: {error.strerror or error}; check its permissions and the "
            "space left, then run the same command again: it continues where it stopped"
        ) from error


@contextmanager
def _locked(path: Path, out: Path) -> Iterator[None]:
    """Hold the lock in the folder `path`, which is made if needed. The system releases it when the process
    ends.
    """
    for _ in range(ATTEMPTS):
        path.mkdir(parents=True, exist_ok=True)
        try:
            file = (path / LOCK).open("a+")
        except FileNotFoundError:
            continue  # another process has finished and removed it meanwhile
        with file:
            _take(file, path, out)
            if _is_at(file, path / LOCK):
                yield
                return
    raise CheckpointError(f"other processes compress into {out} at the same time; choose another folder")


def _take(file: TextIO, path: Path, out: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise CheckpointError(
            f"process {file.read().strip() or 'of another machine'} is compressing into {out} now; wait "
            f"until it ends, or choose another folder (its temporary files are in {path})"
        ) from None
    file.seek(0)
    file.truncate()
    file.write(str(os.getpid()))
    file.flush()


def _is_at(file: TextIO, path: Path) -> bool:
    """Whether the open file is still the file of that name."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    here = os.fstat(file.fileno())
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _short(inputs: Mapping[str, Any], key: str) -> str:
    """A value for a message; a digest is shortened."""
    text = str(inputs.get(key))
    return f"{text[:12]}..." if re.fullmatch("[0-9a-f]{64}", text) else text


def file_digest(path: Path) -> str:
    """SHA-256 of a small file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
