"""The contents of a tensor file, whether it lies on disk as it is or compressed with zstd.

All code that reads tensors uses `opened`. A plain file is read as the system gives it. A file whose name ends
in `.zst` is decompressed piece by piece while it is read, into the caller's memory and one more window. What
a compressed file's header claims is checked before anything is decompressed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from profiler.errors import CheckpointError
from profiler.inside import open_file

SUFFIX = ".zst"
MAX_WINDOW_BYTES = 8 << 20  # of zstd's levels up to 19; a reader's own memory, without the caller's
READ_BYTES = 1 << 18  # of compressed bytes taken from the file at a time
FRAME_HEADER_BYTES = 18  # the longest header in zstd's format


class Source:
    """Contents that are read once, from the first byte to the last. `size_bytes` is their whole size."""

    def __init__(self, size_bytes: int, readinto: Callable[[memoryview], int | None]) -> None:
        self.size_bytes = size_bytes
        self._readinto = readinto

    def fill(self, into: memoryview) -> int:
        """Read until `into` is full or the contents end; return the number of bytes read."""
        at = 0
        while at < len(into) and (count := self._readinto(into[at:])):
            at += count
        return at

    def read(self, size: int) -> bytes:
        """The next `size` bytes, or fewer where the contents end."""
        data = bytearray(size)
        return bytes(memoryview(data)[: self.fill(memoryview(data))])

    def at_end(self) -> bool:
        """Whether the contents have ended; consumes a byte if they have not."""
        return not self.fill(memoryview(bytearray(1)))


@contextmanager
def opened(path: Path, size_bytes: int | None = None) -> Iterator[Source]:
    """Open the contents of `path`. A compressed file's header must state exactly `size_bytes`.

    Raises CheckpointError when a compressed file is corrupt, here or while it is read, and as `open_file`
    does; OSError as `open` does.
    """
    with open_file(path) as file:
        if path.suffix == SUFFIX:
            yield _decompressed(file, path, size_bytes)
        else:
            yield Source(os.fstat(file.fileno()).st_size, file.readinto)


def _decompressed(file: FileIO, path: Path, size_bytes: int | None) -> Source:
    import zstandard

    size = _checked_size(file, path, size_bytes)
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    # Read across frames: bytes after the first frame then show up as unexpected contents.
    reader = decompressor.stream_reader(file, read_size=READ_BYTES, read_across_frames=True)

    def readinto(into: memoryview) -> int:
        try:
            return reader.readinto(into)
        except zstandard.ZstdError as error:
            raise CheckpointError(f"{path} is corrupt: {error}; copy it again") from error

    return Source(size, readinto)


def _checked_size(file: FileIO, path: Path, expected: int | None) -> int:
    """The contents' size in the frame's header. Raises CheckpointError unless it is as expected."""
    import zstandard

    try:
        frame = zstandard.get_frame_parameters(file.read(FRAME_HEADER_BYTES) or b"")
    except zstandard.ZstdError as error:
        raise CheckpointError(f"{path} is not a valid zstd file ({error}); copy it again") from error
    file.seek(0)
    if frame.content_size != expected:
        raise CheckpointError(
            f"{path}: expected contents of {expected} bytes, but the header says {frame.content_size}; "
            "copy the whole folder again"
        )
    if frame.window_size > MAX_WINDOW_BYTES:
        raise CheckpointError(
            f"{path} needs {frame.window_size} bytes of memory to decompress, more than the allowed "
            f"{MAX_WINDOW_BYTES}; compress it with zstd's level 19 or lower"
        )
    return frame.content_size
