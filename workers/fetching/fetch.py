"""One fetch: find the files, make room, transfer and check them. Runs in a process of its own."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from workers.fetching.credentials import credentials_of
from workers.fetching.eviction import Entry, Room, evictions
from workers.fetching.folder import (
    Manifest,
    evict,
    held_bytes,
    is_locked,
    is_there,
    is_whole,
    locked,
    part_of,
    read_manifest,
    size_of,
    touch,
    write_manifest,
)
from workers.fetching.messages import (
    UNREADABLE,
    WRONG_DIGEST,
    Fetched,
    FetchError,
    FetchRequest,
    Progress,
)
from workers.fetching.remote_source import RemoteSource, folder_name, parse_remote
from workers.fetching.remotes import open_remote
from workers.fetching.remotes.interface import Remote, RemoteFile
from workers.fetching.transfer import retried, transfer
from workers.fetching.wanted_files import first_files, weights

T = TypeVar("T")

ROOM_LOCK = ".ostinato-room"  # held while room is made: of two fetches one counts the other's files

Tell = Callable[[Progress], None]


def fetch(request: FetchRequest, tell: Tell) -> Fetched:
    """The folder with the files of a source. Errors: FetchError, OSError."""
    source = parse_remote(request.uri)
    if source is None:
        raise FetchError(UNREADABLE, f"expected the URI of a remote source, got {request.uri!r}")
    if request.revision and request.digest and (known := _known(source, request)) is not None:
        return known
    credentials = credentials_of(request.tenant, request.rules.credentials)
    pinned = (
        replace(source, revision=request.revision) if request.revision and source.has_revisions else source
    )
    remote = retried(
        lambda: open_remote(pinned, credentials, request.rules),
        request.rules,
        lambda note: tell(Progress(0, 0, note)),
        lambda: 0,
    )
    if request.revision and remote.revision != request.revision:
        raise FetchError(
            WRONG_DIGEST,
            f"the files of {source.uri} changed after they were registered; register them under a new name",
        )
    folder = request.parent / folder_name(source, remote.revision)
    with locked(folder):
        return _Fetch(request, remote, folder, tell).run(source)


def _known(source: RemoteSource, request: FetchRequest) -> Fetched | None:
    """The folder if it has these files already: then no source is asked."""
    folder = request.parent / folder_name(source, request.revision)
    if not folder.is_dir():
        return None
    with locked(folder):
        manifest = read_manifest(folder)
        if not is_whole(folder, manifest) or manifest.digest != request.digest:
            return None
        touch(folder, manifest)
    return Fetched(folder, manifest.revision, manifest.digest, manifest.size_bytes)


class _Fetch:
    """A fetch into a folder that is locked."""

    def __init__(self, request: FetchRequest, remote: Remote, folder: Path, tell: Tell) -> None:
        self._request, self._remote, self._folder, self._tell = request, remote, folder, tell
        self._manifest = Manifest()

    def run(self, source: RemoteSource) -> Fetched:
        names, wanted, before = self._remote.names(), self._request.wanted, read_manifest(self._folder)
        self._manifest = replace(
            before, uri=source.uri, revision=self._remote.revision, complete=False, used_at_s=time.time()
        )
        first = self._find(first_files(names, wanted))
        was = is_whole(self._folder, before)
        if was:
            self._require_access(first)
        self._get(first, also=before.files.values() if was else ())
        rest = self._find(weights(names, wanted, self._folder))
        self._get([*first, *rest])
        done = replace(self._manifest, complete=True)
        if self._request.digest and done.digest != self._request.digest:
            raise FetchError(
                WRONG_DIGEST,
                f"the contents of {source.uri} differ from the registered contents; register them under a "
                "new name",
            )
        write_manifest(self._folder, done)
        return Fetched(self._folder, done.revision, done.digest, done.size_bytes)

    def _find(self, names: Iterable[str]) -> list[RemoteFile]:
        return self._retried(lambda: self._remote.find(names))

    def _require_access(self, files: list[RemoteFile]) -> None:
        """Another tenant's fetch may have brought the files: the source decides who may read them."""

        def ask() -> None:
            with self._remote.read(files[0], 0):
                pass

        self._retried(ask)

    def _retried(self, action: Callable[[], T]) -> T:
        return retried(action, self._request.rules, lambda note: self._tell(Progress(0, 0, note)), lambda: 0)

    def _get(self, files: list[RemoteFile], also: Iterable[RemoteFile] = ()) -> None:
        """Transfer the files that are not there. `also` are files that stay."""
        self._manifest = self._manifest.with_files([*also, *files])
        missing = [file for file in files if not is_there(self._folder, self._manifest, file.name)]
        self._reserve(missing)
        total = self._manifest.size_bytes
        done = total - sum(file.size_bytes for file in missing)
        for file in missing:

            def say(count: int, note: str, done: int = done) -> None:
                self._tell(Progress(done + count, total, note))

            digest = transfer(self._remote, file, self._folder, self._request.rules, say)
            done += file.size_bytes
            self._manifest = replace(self._manifest, sha256={**self._manifest.sha256, file.name: digest})
            write_manifest(self._folder, self._manifest)

    def _reserve(self, missing: list[RemoteFile]) -> None:
        """Evict what is not in use, until the missing files have room, and claim it. Errors: FetchError."""
        parent, rules = self._request.parent, self._request.rules
        with locked(parent, ROOM_LOCK):
            others = [
                _entry(folder, self._request.kept) for folder in _folders(parent) if folder != self._folder
            ]
            need = sum(file.size_bytes for file in missing)
            own = sum(file.size_bytes for file in self._manifest.files.values()) - need
            # The parts that are there are completed in place.
            parts = sum(size_of(part_of(self._folder, file.name)) for file in missing)
            free = shutil.disk_usage(parent).free + parts
            mine = Entry(self._folder.name, own, own, time.time(), busy=True)
            for name in evictions([*others, mine], need, Room(rules.budget_bytes, free)):
                evict(parent / name)
            write_manifest(self._folder, self._manifest)


def _folders(parent: Path) -> list[Path]:
    return [path for path in parent.iterdir() if path.is_dir()]


def _entry(folder: Path, kept: tuple[str, ...]) -> Entry:
    manifest, fetching = read_manifest(folder), is_locked(folder)
    held = held_bytes(folder)
    return Entry(
        folder.name,
        held,
        manifest.size_bytes if fetching else held,
        manifest.used_at_s,
        busy=fetching or str(folder) in kept,
    )
