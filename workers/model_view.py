"""A folder with exactly the files of a model's folder that registration reads, for other libraries.

vLLM and transformers look for files by their own rules: `consolidated*.safetensors`, `params.json`, every
`*.safetensors`, an adapter's config. Other files next to a model would change what they load. So they get
links to the files that registration read. A config or an index that they could not read is rewritten with the
same content.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from profiler.config_corrections import corrected
from profiler.files import MAX_CONFIG_BYTES, read_json
from profiler.model_files import CONFIG, files_read, small_files
from profiler.weight_files import INDEX

LOCK = ".{}.lock"  # of a view; each user of the view holds it, shared


def make_view(folder: Path, parent: Path, *, weights: bool = True) -> Path:
    """A folder in `parent` with links to the files of the model in `folder`, with `weights` if set.

    Its name is a hash of its links, so every call for the same files returns the same path. Engines cache
    compiled code by the path of the model. Raises CheckpointError; OSError if it cannot be made.
    """
    contents = _contents(folder.resolve(), weights)
    return contents.made_in(parent)


def hold_view(folder: Path, parent: Path, *, weights: bool = True) -> HeldView:
    """The same as `make_view`, but `sweep_views` keeps it until it is released, or this process ends for any
    reason.
    """
    contents = _contents(folder.resolve(), weights)
    parent.mkdir(parents=True, exist_ok=True)
    descriptor = _locked(parent / LOCK.format(contents.name), fcntl.LOCK_SH)
    try:
        return HeldView(contents.made_in(parent), descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def sweep_views(parent: Path) -> None:
    """Remove the views in `parent` that no process holds.

    Views without a lock are of an older version, and stay: their users are unknown.
    """
    for lock in sorted(parent.glob(LOCK.format("*"))):
        with suppress(OSError):  # held, another user's, or on a file system without locks
            descriptor = _locked(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                _remove(parent, lock)
            finally:
                os.close(descriptor)


def _remove(parent: Path, lock: Path) -> None:
    """Remove the view, the leftovers of its creation, and finally its lock."""
    name = lock.name.removeprefix(".").removesuffix(".lock")
    for path in parent.iterdir():
        if path != lock and (path.name == name or path.name.startswith(f".{name}.")):
            shutil.rmtree(path, ignore_errors=True)
    lock.unlink(missing_ok=True)


class HeldView:
    """A view that is in use."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def release(self) -> None:
        os.close(self._descriptor)


def _locked(lock: Path, kind: int) -> int:
    """The lock, open. Raises OSError: BlockingIOError if another process has it."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, kind)
            if _is_still(descriptor, lock):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # it was removed between the two calls


def _is_still(descriptor: int, lock: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(lock))
    except FileNotFoundError:
        return False


@dataclass(frozen=True)
class _Contents:
    """The links in a view of a folder, and its own files."""

    folder: Path
    names: tuple[str, ...]
    written: Mapping[str, str]

    @property
    def name(self) -> str:
        mark = hashlib.sha256(json.dumps([str(self.folder), self.names, self.written]).encode()).hexdigest()
        return f"{self.folder.name[:40]}-{mark[:16]}"

    def made_in(self, parent: Path) -> Path:
        view = parent / self.name
        if not view.is_dir():
            _make(view, self.folder, self.names, self.written)
        return view


def _contents(folder: Path, weights: bool) -> _Contents:
    names = files_read(folder) if weights else small_files(folder)
    return _Contents(folder, names, _written(folder, names))


@contextmanager
def temporary_view(folder: Path, *, weights: bool = True) -> Iterator[Path]:
    """A view that is removed at the end, for code that reads the model at once. Raises like `make_view`."""
    with tempfile.TemporaryDirectory(prefix="ostinato-model-") as parent:
        yield make_view(folder, Path(parent), weights=weights)


def _written(folder: Path, names: Sequence[str]) -> Mapping[str, str]:
    """The text of each file that the view contains itself.

    transformers needs a type that it knows, and `metadata` in an index, even if empty.
    """
    config = read_json(folder / CONFIG, MAX_CONFIG_BYTES)
    index = read_json(folder / INDEX) if INDEX in names else {}
    written = {CONFIG: corrected(config)} if corrected(config) != config else {}
    if index and not isinstance(index.get("metadata"), dict):
        written[INDEX] = {**index, "metadata": {}}
    return {name: json.dumps(value, indent=1) for name, value in written.items()}


def _make(view: Path, folder: Path, names: tuple[str, ...], written: Mapping[str, str]) -> None:
    """Make the view as a whole or not at all; another process may make the same view at the same time."""
    view.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{view.name}.", dir=view.parent))
    try:
        for name in names:
            (partial / name).parent.mkdir(exist_ok=True)
            if name in written:
                (partial / name).write_text(written[name])
            else:
                (partial / name).symlink_to(folder / name)
        _rename(partial, view)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _rename(partial: Path, view: Path) -> None:
    try:
        os.rename(partial, view)
    except OSError:
        if not view.is_dir():
            raise
