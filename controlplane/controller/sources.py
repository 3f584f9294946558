"""Allowed sources of models and adapters: a URI, checked, and its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from controlplane import errors
from profiler.errors import CheckpointError
from profiler.inside import is_inside, link_outside
from workers.bundled import MODELS

MAX_ENTRIES = 10_000  # of a folder and its subfolders


@dataclass(frozen=True)
class BundledSource:
    """A model that came with a package and is converted on first use."""

    name: str


def parse(uri: str, roots: Sequence[Path], param: str) -> Path | BundledSource:
    """The folder (inside an allowed root) or bundled model of a URI; nothing is read yet.

    Errors: InvalidRequest for an unknown scheme or bundled name, PathNotAllowed.
    """
    if uri.startswith("/"):
        return _allowed(Path(uri), roots, param)
    try:
        parts = urlsplit(uri)
    except ValueError as e:
        raise errors.InvalidRequest(
            f"expected a URI such as file:///models/NAME, got '{uri}': {e}", param=param
        ) from e
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return _allowed(Path(unquote(parts.path)), roots, param)
    if parts.scheme == "bundled":
        if parts.netloc not in MODELS or parts.path:
            raise errors.InvalidRequest(
                f"no bundled model '{uri}' exists; choose one of "
                f"{', '.join('bundled://' + n for n in MODELS)}",
                param=param,
            )
        return BundledSource(parts.netloc)
    raise errors.InvalidRequest(
        f"cannot read from '{uri}': expected an absolute path, file:///..., bundled://..., "
        "hf://ORGANISATION/NAME, s3://..., gs://... or https://...",
        param=param,
    )


def bundled_name(uri: str) -> str:
    """The bundled model of a URI; empty for another source. Errors: InvalidRequest."""
    source = parse(uri, (), "source") if uri.startswith("bundled:") else None
    return source.name if isinstance(source, BundledSource) else ""


def _allowed(path: Path, roots: Sequence[Path], param: str) -> Path:
    try:
        real = path.resolve()
    except (OSError, RuntimeError, ValueError) as e:
        raise errors.InvalidRequest(f"expected the path of a folder, got '{path}': {e}", param=param) from e
    if not is_inside(real, roots):
        raise errors.PathNotAllowed(
            f"'{path}' is outside the folders that this installation reads from "
            "(OSTINATO_ALLOWED_ROOTS, with ':' between folders; for a tenant, the folder of its name in "
            "each); move the files there, or add their folder and start Ostinato again (`ostinato down`, "
            "then `OSTINATO_ALLOWED_ROOTS=FOLDER:FOLDER ostinato up`)",
            param=param,
        )
    return real


def require_folder(path: Path, roots: Sequence[Path], param: str) -> Path:
    """Errors: SourceUnreadable when the folder does not exist or cannot be read; PathNotAllowed when a link
    in it leads out of the `roots`."""
    try:
        if path.is_dir():
            _require_inside(path, roots, param)
            return path
        problem = "is not a folder"
    except OSError as e:
        problem = f"cannot be read: {e.strerror}"
    raise errors.SourceUnreadable(
        f"'{path}' {problem}; give the folder with the model's or adapter's files", param=param
    )


def _require_inside(folder: Path, roots: Sequence[Path], param: str) -> None:
    try:
        link = link_outside(folder, roots, MAX_ENTRIES)
    except CheckpointError as e:
        raise errors.SourceUnreadable(str(e), param=param) from e
    if link is not None:
        raise errors.PathNotAllowed(
            f"'{link}' links to a file outside the folders that this installation reads from; replace the"
            " link by the file itself, or add the file's folder to OSTINATO_ALLOWED_ROOTS",
            param=param,
        )


def require_file(uri: str, roots: Sequence[Path], param: str, folders: bool = False) -> Path:
    """The file of a URI, inside an allowed root; or a folder, if `folders` may be given.

    Errors: InvalidRequest, PathNotAllowed; SourceUnreadable when there is no such file.
    """
    path = parse(uri, roots, param)
    if isinstance(path, BundledSource):
        raise errors.InvalidRequest(f"'{uri}' is a bundled model; give the path of a file", param=param)
    try:
        if folders and path.is_dir():
            return require_folder(path, roots, param)
        with path.open("rb"):
            return path
    except OSError as e:
        raise errors.SourceUnreadable(
            f"'{path}' cannot be read: {e.strerror}; give the path of a file", param=param
        ) from e
