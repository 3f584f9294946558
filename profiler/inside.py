"""Open files that a tenant named: plain files only, inside the allowed folders only.

Registration checks every link of a folder, but files are opened again later by path, there and in engines. A
link may have been added meanwhile, so the real path of each open file is checked. A process that was given no
folders (`confine`) checks nothing, such as a command that users run on their own files.
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
    """Let this process open only files below `roots` from now on; empty: any file."""
    global _roots  # noqa: PLW0603
    _roots = here(roots)


def here(roots: Iterable[Path]) -> tuple[Path, ...]:
    """The roots and their real paths on this machine: another machine may have a link in a root's place."""
    named = tuple(roots)
    return tuple(dict.fromkeys((*named, *(root.resolve() for root in named))))


def open_file(path: Path, roots: tuple[Path, ...] = ()) -> FileIO:
    """Open a plain file for reading; unlike `open` it never waits for the other end of a pipe. `roots`: as in
    `confine`, for this file alone.

    Raises OSError as `open` does, and CheckpointError if it is no plain file or lies outside.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(
                f"expected {path} to be a regular file, got something else; copy the file itself there"
            )
        allowed = roots or _roots
        if allowed and not is_inside(Path(os.readlink(f"/proc/self/fd/{descriptor}")), allowed):
            raise CheckpointError(
                f"{path} links to a file outside the folders that this installation reads from; replace the "
                "link by the file"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return FileIO(descriptor)


def is_inside(real: Path, roots: Iterable[Path]) -> bool:
    """Whether the path `real`, which has no links, lies below one of the roots."""
    return any(real.is_relative_to(root) for root in roots)


def link_outside(folder: Path, roots: Iterable[Path], max_entries: int) -> Path | None:
    """The first link in `folder`, at any depth, that leads out of the `roots`; None if there is none.

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
                    f"{folder} has more than {max_entries} files; give a folder with only one model or "
                    "adapter"
                )
            if entry.is_symlink() and not _leads_inside(entry, roots):
                return entry
            if entry.is_dir():
                left.append(entry)
    return None


def _leads_inside(link: Path, roots: tuple[Path, ...]) -> bool:
    try:
        return is_inside(link.resolve(), roots)
    except (OSError, RuntimeError):  # the links form a circle
        return False
