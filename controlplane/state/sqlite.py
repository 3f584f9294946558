"""The state store in one SQLite file: for a control plane whose processes share a host.

Readers never wait for writers (WAL); a commit returns after its log record is on disk
(synchronous=FULL), so that an acknowledged commit survives kill -9 and power loss.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from controlplane.errors import StaleWrite, Unavailable
from controlplane.state.base import Changes, Entry, Fenced, Lease, Require, Snapshot, Write, not_as_required

SCHEMA_VERSION = 1
# Deletions of this many revisions are known; readers that are further behind read everything.
PAGE = 500  # entries
KEPT_DELETIONS = 10_000

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS schema_version (version INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS revision (value INTEGER NOT NULL)",
    """CREATE TABLE IF NOT EXISTS entries (
        kind TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL, version INTEGER NOT NULL,
        PRIMARY KEY (kind, key))""",
    "CREATE INDEX IF NOT EXISTS entries_by_version ON entries (version)",
    "CREATE TABLE IF NOT EXISTS deletions (kind TEXT NOT NULL, key TEXT NOT NULL, version INTEGER NOT NULL)",
    "CREATE INDEX IF NOT EXISTS deletions_by_version ON deletions (version)",
    # A trigger, because older software that shares the file does not note deletions. A commit raises the
    # revision first.
    """CREATE TRIGGER IF NOT EXISTS note_deletion AFTER DELETE ON entries BEGIN
        INSERT INTO deletions SELECT OLD.kind, OLD.key, value FROM revision;
        END""",
    """CREATE TABLE IF NOT EXISTS leases (
        name TEXT PRIMARY KEY, holder TEXT NOT NULL, epoch INTEGER NOT NULL,
        boot TEXT NOT NULL, until_s REAL NOT NULL)""",
)


BESIDE = ("-wal", "-shm")
FileId = tuple[int, int]  # device and inode


class _Connection(sqlite3.Connection):
    """A connection, with the ids of the -wal and -shm files that it uses; None: it has used none yet."""

    beside: tuple[FileId, ...] | None = None


# Held until a new file's descriptor is closed, so that no other thread has locks on the file then.
_CREATING = threading.Lock()


class SqliteStore:
    """A `StateStore` in the file at `path`, which is created if it is missing.

    A file that was removed or replaced since it was opened is not used any further: other processes do not
    see what is written to it, and it is lost with the last process that has it open.

    Safe to share between threads: each call borrows a separate connection. Not safe across fork().

    Errors: `Unavailable` when the file cannot be opened, is damaged or no database, was written by newer
    software, stays locked for longer than `busy_timeout_s`, or was removed or replaced.
    """

    def __init__(self, path: str | os.PathLike[str], *, busy_timeout_s: float = 10.0) -> None:
        self._path = Path(path)
        self._file: FileId | None = None  # known once it is prepared
        self._busy_timeout_s = busy_timeout_s
        self._idle: list[_Connection] = []
        self._closed = False
        self._pool_lock = threading.Lock()
        # SQLite's own wait polls without an order; a lock is fair enough and wakes at once.
        self._commit_lock = threading.Lock()
        self._create_file()
        try:
            self._prepare()
            self._file = _file_id(self._path)
        except BaseException:
            self.close()
            raise

    def revision(self) -> int:
        with self._connection() as db:
            return _revision(db)

    def snapshot(self, kinds: Sequence[str]) -> Snapshot:
        """All entries of `kinds`, read in one transaction."""
        with self._transaction("BEGIN") as db:
            return Snapshot(_revision(db), {kind: _entries(db, kind) for kind in kinds})

    def changes(self, kinds: Sequence[str], since: int) -> Changes | None:
        """Read in one transaction. None: the revision is too old, or not of this file."""
        with self._transaction("BEGIN") as db:
            revision = _revision(db)
            if not max(0, revision - KEPT_DELETIONS) <= since <= revision:
                return None
            return Changes(revision, _changed(db, kinds, since) if since < revision else {})

    def get(self, kind: str, key: str) -> Entry | None:
        with self._connection() as db:
            row = db.execute(
                "SELECT value, version FROM entries WHERE kind = ? AND key = ?", (kind, key)
            ).fetchone()
        return Entry(*row) if row else None

    def pages(self, kind: str) -> Iterator[Mapping[str, Entry]]:
        after, last = ">=", ""
        while True:
            query = (
                "SELECT key, value, version FROM entries "
                f"WHERE kind = ? AND key {after} ? ORDER BY key LIMIT ?"
            )
            with self._connection() as db:
                found = db.execute(query, (kind, last, PAGE)).fetchall()
            if not found:
                return
            yield {key: Entry(value, version) for key, value, version in found}
            after, (last, _, _) = ">", found[-1]

    def commit(self, writes: Sequence[Write | Require], lease: Lease | None = None) -> int:
        """Apply all writes or none; returns the new revision, after it is on disk.

        Expectations are about the state before the commit, even if two writes name one entry.

        Errors: `StaleWrite` when an expectation does not hold; `Fenced`; `Unavailable` when locked for too
        long or the disk fails.
        """
        if not writes:
            return self.revision()
        # IMMEDIATE: a read lock that is upgraded later could meet another writer and fail half-way.
        with self._commit_lock, self._transaction("BEGIN IMMEDIATE") as db:
            if lease is not None:
                _check_lease(db, lease)
            for write in writes:
                _check(db, write)
            revision = _revision(db) + 1
            db.execute("UPDATE revision SET value = ?", (revision,))
            for write in writes:
                _apply(db, write, revision)
            if revision % KEPT_DELETIONS == 0:
                db.execute("DELETE FROM deletions WHERE version <= ?", (revision - KEPT_DELETIONS,))
        return revision

    def take_lease(self, name: str, holder: str, seconds: float, gone: str | None = None) -> Lease:
        """Take or prolong a lease by the clock of the host since its start; a restart of the host ends all
        leases."""
        boot, now_s = _boot(), time.clock_gettime(time.CLOCK_BOOTTIME)
        with self._commit_lock, self._transaction("BEGIN IMMEDIATE") as db:
            known = _lease(db, name)
            last = Lease(name, known.holder, known.epoch) if known else Lease(name, "", 0)
            lasts = known is not None and known.boot == boot and now_s < known.until_s
            if lasts and last.holder not in (holder, "", gone):
                return last
            lease = last if last.holder == holder else Lease(name, holder, last.epoch + 1)
            row = (name, lease.holder, lease.epoch, boot, now_s + seconds)
            db.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?)", row)
        return lease

    def release_lease(self, lease: Lease) -> None:
        with self._commit_lock, self._transaction("BEGIN IMMEDIATE") as db:
            where = (lease.name, lease.holder, lease.epoch)
            db.execute("UPDATE leases SET holder = '' WHERE name = ? AND holder = ? AND epoch = ?", where)

    def close(self) -> None:
        """Close all connections; those in use are closed at the end of their call."""
        with self._pool_lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for db in idle:
            db.close()

    def _create_file(self) -> None:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # SQLite gives its -wal and -shm files the mode of the database. An existing file is left
            # alone: closing any descriptor of it would drop this process's SQLite locks (POSIX).
            with _CREATING:
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            self._check_existing()
        except OSError as error:
            raise Unavailable(
                f"the state file {self._path} cannot be opened: {error.strerror}; "
                "give Ostinato's user write access to the file and its folder, or choose another file"
            ) from error

    def _check_existing(self) -> None:
        if not self._path.parent.is_dir():
            raise Unavailable(
                f"expected a folder {self._path.parent} for the state file, found none; create it, or choose "
                "another file"
            )
        # SQLite would take a file smaller than its smallest page for an empty one and overwrite it.
        if self._path.is_file() and 0 < self._path.stat().st_size < 512:
            raise self._damaged("too small for a database")

    def _prepare(self) -> None:
        with self._connection() as db:
            self._enter_wal(db)
        with self._transaction("BEGIN IMMEDIATE") as db:
            for statement in _SCHEMA:
                db.execute(statement)
            version = db.execute("SELECT max(version) FROM schema_version").fetchone()[0]
            if version is None:
                db.execute("INSERT INTO schema_version VALUES (?)", (SCHEMA_VERSION,))
                db.execute("INSERT INTO revision VALUES (0)")
            elif version > SCHEMA_VERSION:
                raise Unavailable(
                    f"a newer Ostinato made the state file {self._path} (schema {version}, this version "
                    f"reads up to {SCHEMA_VERSION}); upgrade Ostinato, or choose another state file"
                )

    def _enter_wal(self, db: sqlite3.Connection) -> None:
        """Enter WAL mode. This change does not wait for the busy timeout when several processes make it at
        once."""
        deadline = time.monotonic() + self._busy_timeout_s
        while True:
            try:
                mode = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
                break
            except sqlite3.OperationalError as error:
                if not _is_busy(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        if mode != "wal":
            raise Unavailable(
                f"the file system of {self._path} cannot hold a write-ahead log (it answered {mode!r}); "
                "put the state file on a local disk"
            )

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[_Connection]:
        """A transaction, which is valid only if the file is still the one under its name afterwards."""
        with self._connection() as db:
            db.execute(begin)
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    @contextmanager
    def _connection(self) -> Iterator[_Connection]:
        """Borrow a connection; one that had an SQLite error is not used again."""
        db: _Connection | None = None
        try:
            db = self._borrow()
            self._require_unmoved(db)
            yield db
            self._note_files(db)
        except sqlite3.Error as error:
            if db is not None:
                db.close()
            raise self._unavailable(error) from error
        except BaseException:
            if db is not None:
                self._give_back(db)
            raise
        else:
            self._give_back(db)

    def _require_unmoved(self, db: _Connection) -> None:
        """Check that the files were not replaced. While a connection is open, no other SQLite process removes
        any of the three files."""
        beside = self._beside()
        if self._is_moved() or (db.beside is not None and db.beside != beside):
            raise self._moved()

    def _note_files(self, db: _Connection) -> None:
        """Note the -wal and -shm files after a use, which creates them if they were missing."""
        self._require_unmoved(db)
        if db.beside is None and len(beside := self._beside()) == len(BESIDE):
            db.beside = beside

    def _beside(self) -> tuple[FileId, ...]:
        return tuple(filter(None, (_file_id(f"{self._path}{end}") for end in BESIDE)))

    def _is_moved(self) -> bool:
        return self._file is not None and _file_id(self._path) != self._file

    def _moved(self) -> Unavailable:
        return Unavailable(
            f"the state file {self._path} (or its -wal or -shm file) was removed or replaced while in use: "
            "Ostinato accepts no changes, and engines keep running; put the three files back, or run "
            "`ostinato down`, restore a backup there (or delete the files to start empty), and run "
            "`ostinato up`",
            retry_after_s=5.0,
        )

    def _borrow(self) -> _Connection:
        with self._pool_lock:
            if self._closed:
                raise Unavailable(f"this process has closed the state file {self._path}")
            if self._idle:
                return self._idle.pop()
        db = sqlite3.connect(  # never creates the file: a removed file stays away
            f"file://{quote(str(self._path.absolute()))}?mode=rw",
            uri=True,
            timeout=self._busy_timeout_s,
            isolation_level=None,
            check_same_thread=False,
            factory=_Connection,
        )
        try:
            db.execute("PRAGMA synchronous = FULL")
        except BaseException:
            db.close()
            raise
        return db

    def _give_back(self, db: _Connection) -> None:
        with self._pool_lock:
            if not self._closed:
                self._idle.append(db)
                return
        db.close()

    def _damaged(self, reason: str) -> Unavailable:
        return Unavailable(
            f"the state file {self._path} is damaged or no SQLite database ({reason}); stop Ostinato, move "
            "the file and its -wal and -shm files away, and restore a backup or start empty"
        )

    def _unavailable(self, error: sqlite3.Error) -> Unavailable:
        if self._is_moved():
            return self._moved()
        if _is_busy(error):
            return Unavailable(
                f"the state file {self._path} stayed locked for {self._busy_timeout_s:g} s; try again, or "
                "end the process that holds the lock",
                retry_after_s=1.0,
            )
        if _code(error) in {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}:
            return self._damaged(str(error))
        return Unavailable(
            f"the state file {self._path} cannot be used: {error}; check the disk's space and health, and "
            "that Ostinato's user may write to the file",
            retry_after_s=5.0,
        )


def _file_id(path: str | os.PathLike[str]) -> FileId | None:
    """The file's id; None: it does not exist. It is never opened: closing it would drop this process's
    locks."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _code(error: sqlite3.Error) -> int:
    """The primary result code: the low byte of the extended one."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _is_busy(error: sqlite3.Error) -> bool:
    return _code(error) in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


def _revision(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT value FROM revision").fetchone()[0])


def _entries(db: sqlite3.Connection, kind: str) -> dict[str, Entry]:
    with closing(db.execute("SELECT key, value, version FROM entries WHERE kind = ?", (kind,))) as rows:
        return {key: Entry(value, version) for key, value, version in rows}


def _changed(db: sqlite3.Connection, kinds: Sequence[str], since: int) -> dict[str, dict[str, Entry | None]]:
    """The changed entries; an entry that was deleted and created again counts as existing."""
    changed: dict[str, dict[str, Entry | None]] = {}
    deleted = db.execute("SELECT kind, key FROM deletions WHERE version > ?", (since,))
    for kind, key in deleted:
        changed.setdefault(kind, {})[key] = None
    written = db.execute("SELECT kind, key, value, version FROM entries WHERE version > ?", (since,))
    for kind, key, value, version in written:
        changed.setdefault(kind, {})[key] = Entry(value, version)
    return {kind: entries for kind, entries in changed.items() if kind in kinds}


class _LeaseRow(NamedTuple):
    """A lease, and until when it lasts by the clock of the host since this start of it."""

    holder: str
    epoch: int
    boot: str
    until_s: float


def _lease(db: sqlite3.Connection, name: str) -> _LeaseRow | None:
    row = db.execute("SELECT holder, epoch, boot, until_s FROM leases WHERE name = ?", (name,)).fetchone()
    return None if row is None else _LeaseRow(*row)


def _check_lease(db: sqlite3.Connection, lease: Lease) -> None:
    """Check the lease. It may have expired, if no other process has taken it."""
    known = _lease(db, lease.name)
    if known is None or (known.holder, known.epoch) != (lease.holder, lease.epoch):
        raise Fenced(lease)


@cache
def _boot() -> str:
    """The id of this start of the host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _check(db: sqlite3.Connection, write: Write | Require) -> None:
    if isinstance(write, Write) and write.expected_version is None:
        return
    where = (write.kind, write.key)
    row = db.execute("SELECT value, version FROM entries WHERE kind = ? AND key = ?", where).fetchone()
    value, version = row or (None, 0)
    if isinstance(write, Require):
        if value != write.value:
            raise not_as_required(write)
    elif version != write.expected_version:
        raise StaleWrite(
            f"{write.kind} {write.key!r} is at version {version}, expected {write.expected_version} "
            "(0: absent); another process changed it: read it again",
            details={"kind": write.kind, "key": write.key, "version": version},
        )


def _apply(db: sqlite3.Connection, write: Write | Require, revision: int) -> None:
    if isinstance(write, Require):
        return
    if write.value is None:
        db.execute("DELETE FROM entries WHERE kind = ? AND key = ?", (write.kind, write.key))
    else:
        db.execute(
            "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?)",
            (write.kind, write.key, write.value, revision),
        )
