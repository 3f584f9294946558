"""What every kind of source can do."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from workers.fetching.messages import UNREADABLE, FetchError


@dataclass(frozen=True)
class RemoteFile:
    """`tag` changes with the contents. The digests that are known before the transfer are compared."""

    name: str
    size_bytes: int
    tag: str = ""
    sha256: str = ""
    git_sha1: str = ""
    md5: str = ""


class Remote(Protocol):
    """The files of one source at one `revision`. Every method raises FetchError or Interrupted."""

    @property
    def revision(self) -> str: ...

    def names(self) -> Collection[str]: ...

    def find(self, names: Iterable[str]) -> list[RemoteFile]:
        """The files of these names, each of which must exist."""
        ...

    def read(self, file: RemoteFile, start: int) -> AbstractContextManager[tuple[int, Iterator[bytes]]]:
        """The first byte that comes, which is `start` or 0, and the bytes from there."""
        ...


def revision_of(files: Iterable[RemoteFile]) -> str:
    """A revision for sources that have none."""
    text = "\n".join(sorted(f"{file.name} {file.size_bytes} {file.tag}" for file in files))
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def existing(files: Mapping[str, RemoteFile], names: Iterable[str], where: str) -> list[RemoteFile]:
    """The files of these names. Errors: FetchError if one is not there."""
    wanted = list(names)
    if missing := [name for name in wanted if name not in files]:
        raise FetchError(
            UNREADABLE,
            f"{where} lacks {len(missing)} files that its index names, such as {missing[0]}; name another "
            "revision or folder, or copy the missing files there",
        )
    return [files[name] for name in wanted]
