"""The folder that a fetch fills: its manifest, its lock, and what it holds.

A file is in its place only when it is whole and its digest is right. Parts lie in `PARTS`: a fetch that was
killed goes on there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from profiler.model_files import small_names
from workers.fetching.remotes.interface import RemoteFile

MANIFEST = ".ostinato-fetched.json"
LOCK = ".ostinato-lock"
PARTS = ".ostinato-parts"
POLL_S = 0.2


@dataclass(frozen=True)
class Manifest:
    """What the folder is to hold. `sha256` has the digests of the files that are whole. `used_at_s`: when the
    folder was last asked for."""

    uri: str = ""
    revision: str = ""
    files: Mapping[str, RemoteFile] = field(default_factory=dict)
    sha256: Mapping[str, str] = field(default_factory=dict)
    complete: bool = False
    used_at_s: float = 0.0

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())

    @property
    def digest(self) -> str:
        """The digest of the contents of all files."""
        text = "\n".join(f"{name} {self.sha256[name]}" for name in sorted(self.files))
        return hashlib.sha256(text.encode()).hexdigest()

    def with_files(self, files: Iterable[RemoteFile]) -> Manifest:
        """The manifest for exactly these files. Digests stay of files whose tag and size are the same."""
        now = {file.name: file for file in files}
        kept = {
            name: digest
            for name, digest in self.sha256.items()
            if name in now and self.files.get(name) == now[name]
        }
        return replace(self, files=now, sha256=kept)


def read_manifest(folder: Path) -> Manifest:
    """The manifest; an empty one if there is none that can be read."""
    try:
        raw = json.loads((folder / MANIFEST).read_bytes())
        files = {name: RemoteFile(**file) for name, file in raw["files"].items()}
        return Manifest(**raw | {"files": files})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return Manifest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest by a whole new one."""
    beside = folder / f"{MANIFEST}.new"
    with beside.open("w") as file:
        json.dump(asdict(manifest), file)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(folder / MANIFEST)


def is_there(folder: Path, manifest: Manifest, name: str) -> bool:
    """Whether a file is whole, by its size; its digest was checked when it was put there."""
    try:
        return name in manifest.sha256 and (folder / name).stat().st_size == manifest.files[name].size_bytes
    except OSError:
        return False


def is_whole(folder: Path, manifest: Manifest) -> bool:
    return manifest.complete and all(is_there(folder, manifest, name) for name in manifest.files)


def touch(folder: Path, manifest: Manifest) -> None:
    write_manifest(folder, replace(manifest, used_at_s=time.time()))


def part_of(folder: Path, name: str) -> Path:
    """Where the bytes of a file lie until it is whole."""
    return folder / PARTS / name.replace("/", "--")


def held_bytes(folder: Path) -> int:
    """The bytes of weights and parts in a folder: what its eviction frees."""
    return sum(size_of(path) for path in _evictable(folder))


def evict(folder: Path) -> None:
    """Delete weights and parts. Config and tokenizer stay: variants are read with them."""
    for path in _evictable(folder):
        path.unlink(missing_ok=True)


def _evictable(folder: Path) -> Iterator[Path]:
    names = set(read_manifest(folder).files)
    small = set(small_names(names))
    yield from (folder / name for name in names - small if (folder / name).is_file())
    with suppress(OSError):
        yield from list((folder / PARTS).iterdir())


def size_of(path: Path) -> int:
    """The size of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


@contextmanager
def locked(folder: Path, name: str = LOCK) -> Iterator[None]:
    """Hold the lock of a folder, for all processes of this node, or of all nodes that share the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not _try_lock(descriptor):
            time.sleep(POLL_S)
        yield
    finally:
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Whether a process fetches into the folder now."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _try_lock(descriptor)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
