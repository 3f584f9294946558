"""The lossless stage: compresses files of a written delta with zstd, if loading them becomes faster.

DeltaZip (section 4.3) ends with a lossless stage, too: nvCOMP's GDeflate. Codes of few bits are not equally
frequent, so an entropy coder still saves space. Whether that helps depends on the disk. Each file is
compressed and its decompression is timed on this machine. The compressed file is kept if reading and
decompressing it takes less time than reading the plain file.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiler.contents import SUFFIX, opened
from profiler.errors import CheckpointError
from profiler.files import read_json
from profiler.variants.delta import DELTA, VERSIONS, ZSTD, ZSTD_VERSION, read_files
from profiler.variants.types import FileRef, StoredFile
from workers.compression.durable import write_json
from workers.compression.types import Progress
from workers.deltas.folders import sync

LEVEL = 3  # only the codes' frequencies help, which every level uses
MAX_LEVEL = 19  # above it, readers would need more memory than they reserve
MB = 1e6
_CHUNK_BYTES = 1 << 20  # as readers use it; it is still in the processor's cache when it is hashed
_PROBED_BYTES = 256 << 20  # of files read to measure the storage's rate


@dataclass(frozen=True)
class Measured:
    """One file: the size of its contents, its compressed size, and the processor seconds of its
    decompression.
    """

    name: str
    contents_bytes: int
    compressed_bytes: int
    decompress_s: float

    def plain_load_s(self, storage_bytes_per_s: float) -> float:
        return self.contents_bytes / storage_bytes_per_s

    def compressed_load_s(self, storage_bytes_per_s: float) -> float:
        """The time of reading, then decompressing: one thread of a loader does both."""
        return self.compressed_bytes / storage_bytes_per_s + self.decompress_s

    def gains(self, storage_bytes_per_s: float) -> bool:
        """Whether the compressed file is loaded faster."""
        return self.compressed_load_s(storage_bytes_per_s) < self.plain_load_s(storage_bytes_per_s)


@dataclass(frozen=True)
class Lossless:
    """The result for a folder: the measured files, and the names of those that are stored compressed."""

    files: tuple[Measured, ...]
    kept: frozenset[str]
    storage_bytes_per_s: float
    storage_measured: bool

    @property
    def size_before_bytes(self) -> int:
        return sum(file.contents_bytes for file in self.files)

    @property
    def size_after_bytes(self) -> int:
        return sum(f.compressed_bytes if f.name in self.kept else f.contents_bytes for f in self.files)

    def saved_bytes(self, *names: str) -> int:
        """The bytes saved by compressing these files; without names: all files."""
        return sum(
            file.contents_bytes - file.compressed_bytes
            for file in self.files
            if file.name in self.kept and (not names or file.name in names)
        )

    @property
    def load_before_s(self) -> float:
        return sum(file.plain_load_s(self.storage_bytes_per_s) for file in self.files)

    @property
    def load_after_s(self) -> float:
        rate = self.storage_bytes_per_s
        return sum(
            f.compressed_load_s(rate) if f.name in self.kept else f.plain_load_s(rate) for f in self.files
        )

    @property
    def decompressed_bytes_per_s(self) -> float:
        """Contents per second of decompression, over all files."""
        seconds = sum(file.decompress_s for file in self.files)
        return self.size_before_bytes / seconds if seconds else 0.0

    def facts(self) -> dict[str, Any]:
        """Figures of the whole folder, for people."""
        return {
            "files": len(self.files),
            "compressed_files": len(self.kept),
            "size_before_bytes": self.size_before_bytes,
            "size_after_bytes": self.size_after_bytes,
            "storage_mb_per_s": round(self.storage_bytes_per_s / MB, 1) if self.files else None,
            "storage_measured": self.storage_measured,
            "decompressed_mb_per_s": round(self.decompressed_bytes_per_s / MB, 1),
            "load_before_s": self.load_before_s,
            "load_after_s": self.load_after_s,
        }


def compress_files(
    folder: Path,
    storage_mb_per_s: float | None = None,
    level: int = LEVEL,
    progress: Progress | None = None,
) -> Lossless:
    """Compress the files of the delta in `folder` if that makes loading faster.

    `storage_mb_per_s` is the rate (10^6 bytes per second) of the storage that engines read from; None: the
    rate of a cold read of these files here. delta.json changes last and atomically, so that the folder can be
    read at any time, also after a crash. Files that are already compressed stay so, and are timed like the
    others.
    Raises CheckpointError if the folder holds no valid delta or cannot be written.
    """
    if not 1 <= level <= MAX_LEVEL:
        raise ValueError(f"expected a level of 1 to {MAX_LEVEL}, got {level}")
    if storage_mb_per_s is not None and not storage_mb_per_s > 0:
        raise ValueError(f"expected a storage rate above 0 MB/s, got {storage_mb_per_s}")
    tell = progress or (lambda share, what: None)
    raw = read_json(folder / DELTA)
    if raw.get("version") not in VERSIONS:
        raise CheckpointError(
            f"{folder / DELTA}: expected a version of {VERSIONS}, got {raw.get('version')!r}"
        )
    files = read_files(raw, folder)
    plain = [file for file in files.values() if file.compressed is None]
    try:
        if storage_mb_per_s is None:
            rate = cold_read_bytes_per_s(folder / file.stored_name for file in files.values())
        else:
            rate = storage_mb_per_s * MB
        tried = [_tried(folder, file, level, tell, number / len(plain)) for number, file in enumerate(plain)]
        before = [_timed(folder, file, file.compressed) for file in files.values() if file.compressed]
        kept = {measured.name: stored for measured, stored in tried if measured.gains(rate)}
        compressed = frozenset(kept) | {measured.name for measured in before}
        _keep(folder, raw, kept)
        _sweep(folder, compressed, files)
    except OSError as error:
        raise CheckpointError(
            f"cannot compress the files of {folder}: {error.strerror or error}; "
            "check its permissions and the space left"
        ) from error
    tell(1.0, "done")
    measured = (*before, *(measured for measured, _ in tried))
    return Lossless(measured, compressed, rate, storage_mb_per_s is None)


def cold_read_bytes_per_s(paths: Iterable[Path], clock: Callable[[], float] = time.perf_counter) -> float:
    """The storage's rate for files that the system has not cached, from at most 256 MiB of them.

    First the system is asked to drop its cache of the files. Infinite if there is nothing to read.
    """
    left, spent = _PROBED_BYTES, 0.0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    for path in sorted(paths, key=lambda path: -path.stat().st_size):
        _drop_cached(path)
        with path.open("rb", buffering=0) as file:
            begun = clock()
            while left > 0 and (count := file.readinto(buffer)):
                left -= count
            spent += clock() - begun
    return (_PROBED_BYTES - left) / spent if spent else float("inf")


def _drop_cached(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _tried(
    folder: Path, file: FileRef, level: int, tell: Progress, share: float
) -> tuple[Measured, StoredFile]:
    """Compress one file into a new file in the same folder, and time its decompression.

    Raises CheckpointError if that does not give its contents back.
    """
    tell(share, f"compressing {file.name}")
    stored = _compress(folder / file.name, folder / f"{file.name}{SUFFIX}", file.size_bytes, level)
    return _timed(folder, file, stored), stored


def _timed(folder: Path, file: FileRef, stored: StoredFile) -> Measured:
    """Time the decompression of a compressed file. Raises CheckpointError if the contents differ."""
    seconds, digest = _decompress(folder / f"{file.name}{SUFFIX}", file.size_bytes)
    if digest != file.sha256:
        raise CheckpointError(f"{folder / file.name} no longer has the checksum of {DELTA}; copy it again")
    return Measured(file.name, file.size_bytes, stored.size_bytes, seconds)


def _compress(source: Path, target: Path, size_bytes: int, level: int) -> StoredFile:
    """Compress into one frame that states the size of its contents, and sync it to the disk."""
    import zstandard

    with source.open("rb") as contents, target.open("wb") as out:
        zstandard.ZstdCompressor(level=level).copy_stream(contents, out, size=size_bytes)
    sync(target)
    with target.open("rb") as written:
        return StoredFile(target.stat().st_size, hashlib.file_digest(written, "sha256").hexdigest())


def _decompress(path: Path, size_bytes: int) -> tuple[float, str]:
    """Processor seconds to decompress a file that the system has cached, and the SHA-256 of its contents."""
    buffer, digest, seconds = memoryview(bytearray(_CHUNK_BYTES)), hashlib.sha256(), 0.0
    with opened(path, size_bytes) as source:
        while True:
            begun = time.thread_time()
            count = source.fill(buffer)
            seconds += time.thread_time() - begun
            if not count:
                return seconds, digest.hexdigest()
            digest.update(buffer[:count])


def _keep(folder: Path, raw: dict[str, Any], kept: dict[str, StoredFile]) -> None:
    """Record the compressed files in `kept` in delta.json."""
    if kept:
        files = {name: {**entry, **_described(kept.get(name))} for name, entry in raw["files"].items()}
        version = max(raw["version"], ZSTD_VERSION)
        write_json(folder / DELTA, {**raw, "version": version, "files": files}, indent=1)


def _sweep(folder: Path, compressed: Collection[str], names: Iterable[str]) -> None:
    """Remove the form of each file, plain or compressed, that delta.json does not list."""
    for name in names:
        (folder / (name if name in compressed else f"{name}{SUFFIX}")).unlink(missing_ok=True)


def _described(stored: StoredFile | None) -> dict[str, Any]:
    if stored is None:
        return {}
    return {"compressed": {"encoding": ZSTD, "size_bytes": stored.size_bytes, "sha256": stored.sha256}}
