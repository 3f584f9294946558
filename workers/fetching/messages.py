"""What a process that fetches is asked, and the lines that it answers with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter


class Wanted(StrEnum):
    """Which files are fetched: those of a checkpoint, or those of an adapter or delta."""

    MODEL = "model"
    ADAPTER = "adapter"


@dataclass(frozen=True)
class FetchRules:
    """The installation's rules. `budget_bytes` is the most that fetched files may take on a node; 0: as much
    as its disk has. `private_hosts` may have addresses that are not public. `credentials` is the file of the
    tenants' credentials. A failed transfer is repeated `retries` times in a row, first after `pause_s`."""

    budget_bytes: int = 0
    private_hosts: tuple[str, ...] = ()
    credentials: str = ""
    retries: int = 8
    pause_s: float = 1.0


@dataclass(frozen=True)
class FetchRequest:
    """Fetch `uri` into a folder in `parent`; with `revision` and `digest`, exactly these files.

    The folders in `kept` are in use: they are not evicted. `tenant` names whose credentials are used; "": the
    installation's.
    """

    uri: str
    parent: Path
    wanted: Wanted = Wanted.MODEL
    tenant: str = ""
    revision: str = ""
    digest: str = ""
    kept: tuple[str, ...] = ()
    rules: FetchRules = FetchRules()


@dataclass(frozen=True)
class Progress:
    done_bytes: int
    total_bytes: int
    note: str = ""
    kind: Literal["progress"] = "progress"


@dataclass(frozen=True)
class Fetched:
    """`revision` is the commit on a hub; otherwise it is made of the sizes and tags of the files. `digest` is
    that of the contents."""

    folder: Path
    revision: str
    digest: str
    size_bytes: int
    kind: Literal["fetched"] = "fetched"


@dataclass(frozen=True)
class Failed:
    """`code` is one of the codes in docs/errors.md."""

    code: str
    message: str
    kind: Literal["failed"] = "failed"


Line = Annotated[Progress | Fetched | Failed, Field(discriminator="kind")]
LINES: TypeAdapter[Line] = TypeAdapter(Line)
REQUESTS: TypeAdapter[FetchRequest] = TypeAdapter(FetchRequest)


class FetchError(Exception):
    """A fetch that a repetition would not help."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class Interrupted(Exception):
    """A transfer that is repeated: the network or the server failed."""


UNREADABLE = "source_unreadable"
NOT_FOUND = "source_not_found"
DENIED = "source_denied"
NOT_ALLOWED = "source_not_allowed"
WRONG_DIGEST = "wrong_digest"
UNREACHABLE = "source_unreachable"
NO_SPACE = "disk_budget_too_small"
