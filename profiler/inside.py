"""Opening what a tenant named: plain files only, and none outside the folders that may be read from.

Registration looks at every link of a folder, but files are opened again by their paths, there and in engines:
a link may have been put there meanwhile. So each open file is asked where it lies. Nothing is checked in a
process that was not told its folders (`confine`), such as a command that somebody runs on files of their own.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from io import FileIO
from pathlib import Path

from profiler.errors import CheckpointError

_roots: tuple[Path, ...] = ()


def confine(roots: Iterable[Path]) -> None:
    """From now on this process opens files below `roots` only; none: any."""
    global _roots  # noqa: PLW0603
    _roots = here(roots)


def here(roots: Iterable[Path]) -> tuple[Path, ...]:
    """The roots, and where they lie on this machine: another may have a link in a root's place."""
    named = tuple(roots)
    return tuple(dict.fromkeys((*named, *(root.resolve() for root in named))))


def open_file(path: Path, roots: tuple[Path, ...] = ()) -> FileIO:
    """A plain file, for reading; unlike `open` it does not wait for a pipe's other end. `roots`: as `confine`
    has them, for this file alone.

    Raises OSError as `open` does, and CheckpointError for what is no plain file or lies outside.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(f"{path} is no plain file; copy the file itself there")
        allowed = roots or _roots
        if allowed and not is_inside(Path(os.readlink(f"/proc/self/fd/{descriptor}")), allowed):
            raise CheckpointError(
                f"{path} lies outside the folders this installation reads from; put the file itself there"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return FileIO(descriptor)


def is_inside(real: Path, roots: Iterable[Path]) -> bool:
    """Of a path without links."""
    return any(real.is_relative_to(root) for root in roots)


def link_outside(folder: Path, roots: Iterable[Path], max_entries: int) -> Path | None:
    """The first link in `folder`, at any depth, that leads out of the `roots`; None where there is none.

    Links among the roots stay: caches of the Hugging Face hub consist of them. Raises OSError;
    CheckpointError when there are more than `max_entries`.
    """
    roots, left, seen, entries = tuple(roots), [folder], set[Path](), 0
    while left:
        here = left.pop()
        if (real := here.resolve()) in seen:
            continue
        seen.add(real)
        for entry in here.iterdir():
            entries += 1
            if entries > max_entries:
                raise CheckpointError(
                    f"{folder} holds more than {max_entries} files; give the folder of one model or adapter"
                )
            if entry.is_symlink() and not _leads_inside(entry, roots):
                return entry
            if entry.is_dir():
                left.append(entry)
    return None


def _leads_inside(link: Path, roots: tuple[Path, ...]) -> bool:
    try:
        return is_inside(link.resolve(), roots)
    except (OSError, RuntimeError):  # it leads in a circle
        return False
