"""URIs of remote sources: `hf://org/name@revision`, `org/name`, `s3://`, `gs://`, `https://`. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

_REPOSITORY = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB_NAME = re.compile(rf"(?:{_REPOSITORY}/)?{_REPOSITORY}")
_BARE = re.compile(rf"{_REPOSITORY}/{_REPOSITORY}(?:@.+)?")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")


class SourceKind(StrEnum):
    HUB = "hf"
    S3 = "s3"
    GS = "gs"
    HTTPS = "https"
    HTTP = "http"


@dataclass(frozen=True)
class RemoteSource:
    """`name` is a repository of the hub; a bucket and a folder in it; or a host and a folder of it.

    Only the hub has revisions; empty: its default branch.
    """

    kind: SourceKind
    name: str
    revision: str = ""

    @property
    def uri(self) -> str:
        text = f"{self.kind}://{self.name}"
        return f"{text}@{self.revision}" if self.revision else text

    @property
    def has_revisions(self) -> bool:
        return self.kind is SourceKind.HUB


def parse_remote(uri: str) -> RemoteSource | None:
    """The remote source of a URI; None for another URI. Errors: ValueError, which says what was expected."""
    if is_hub_name(uri):
        return _hub(uri)
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme not in set(SourceKind):
        return None
    match SourceKind(scheme):
        case SourceKind.HUB:
            return _hub(rest)
        case SourceKind.S3 | SourceKind.GS as kind:
            return _bucket(kind, rest)
        case kind:
            return _web(kind, uri)


def _hub(text: str) -> RemoteSource:
    name, at, revision = text.partition("@")
    if not _HUB_NAME.fullmatch(name) or ".." in name or (at and not _revision(revision)):
        raise ValueError(f"expected hf://ORGANISATION/NAME or hf://ORGANISATION/NAME@REVISION, got {text!r}")
    return RemoteSource(SourceKind.HUB, name, revision)


def _revision(text: str) -> bool:
    return _REVISION.fullmatch(text) is not None and ".." not in text


def _bucket(kind: SourceKind, text: str) -> RemoteSource:
    bucket, _, folder = text.rstrip("/").partition("/")
    if not _BUCKET.fullmatch(bucket) or not _plain(folder):
        raise ValueError(f"expected {kind}://BUCKET/FOLDER, got {kind}://{text}")
    return RemoteSource(kind, f"{bucket}/{folder}" if folder else bucket)


def _web(kind: SourceKind, uri: str) -> RemoteSource:
    try:
        parts = urlsplit(uri)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    # A password or a signature in the URI would be written into records and logs.
    if not host or "@" in parts.netloc or parts.query or parts.fragment or not _plain(parts.path):
        raise ValueError(
            f"expected {kind}://HOST/FOLDER without a user, a password, a query or a fragment; "
            "credentials belong in OSTINATO_SOURCE_CREDENTIALS"
        )
    host = f"[{host}]" if ":" in host else host
    place = host if port is None else f"{host}:{port}"
    return RemoteSource(kind, f"{place}{parts.path.rstrip('/')}")


def _plain(path: str) -> bool:
    """Whether a folder's path has only parts that no server reads as another folder."""
    return (
        path.isprintable() and not any(part in (".", "..") for part in path.split("/")) and "\\" not in path
    )


def is_hub_name(text: str) -> bool:
    """Whether a text without a scheme is a name of the hub."""
    return _BARE.fullmatch(text) is not None


def is_allowed(source: RemoteSource, allowed: Sequence[str]) -> bool:
    """Whether an entry of the allow-list names the kind of the source (`hf`) or begins its URI (`hf://org/`)."""
    return any(source.kind == entry or _begins(source.uri, entry) for entry in allowed)


def _begins(uri: str, entry: str) -> bool:
    """Whether a URI is that of the entry, or of something in it."""
    whole = entry.rstrip("/")
    return "://" in entry and (uri == whole or uri.startswith((f"{whole}/", f"{whole}@")))


def folder_name(source: RemoteSource, revision: str) -> str:
    """The name of the folder for these files: readable, and different for different files."""
    mark = hashlib.sha256(f"{source.kind}://{source.name}@{revision}".encode()).hexdigest()[:16]
    readable = re.sub(r"[^A-Za-z0-9._-]+", "--", source.name).strip(".-")[-60:]
    return f"{source.kind}--{readable}-{mark}"
