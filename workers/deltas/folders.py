"""Writes a folder of files such that it exists as a whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from profiler.errors import CheckpointError


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A hidden folder next to `target` that gets its name at the end; on any failure it is removed.

    Raises CheckpointError if `target` exists, or the disk fails.
    """
    target = target.absolute()
    if target.exists() or target.is_symlink():
        raise CheckpointError(
            f"the folder {target} exists already; choose another folder, or remove this folder first"
        )
    partial = target.parent / f".{target.name}.{os.getpid()}.partial"
    try:
        partial.mkdir(parents=True)
        yield partial
        _to_disk(partial)
        partial.rename(target)
        sync(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {target}: {error.strerror or error}; check its permissions and the space left"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _to_disk(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        sync(path)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
