"""A folder that holds what registration reads of a model's folder, and nothing else, for other libraries.

vLLM and transformers look for files by rules of their own: `consolidated*.safetensors`, `params.json`, every
`*.safetensors`, an adapter's config. What lies beside a model would change what they load. So they are given
links to the files that were read. A config or an index that they could not read is written anew, and says
the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from profiler.config_corrections import corrected
from profiler.files import MAX_CONFIG_BYTES, read_json
from profiler.model_files import CONFIG, files_read, small_files
from profiler.weight_files import INDEX


def make_view(folder: Path, parent: Path, *, weights: bool = True) -> Path:
    """A folder in `parent` with links to the files of the model in `folder`; `weights`: with those.

    Its name follows from what it links to, so every call for the same files returns the same path: what
    engines compile is kept by the path of the model. Raises CheckpointError; OSError if it cannot be made.
    """
    folder = folder.resolve()
    names = files_read(folder) if weights else small_files(folder)
    written = _written(folder, names)
    mark = hashlib.sha256(json.dumps([str(folder), names, written]).encode()).hexdigest()
    view = parent / f"{folder.name[:40]}-{mark[:16]}"
    if not view.is_dir():
        _make(view, folder, names, written)
    return view


@contextmanager
def temporary_view(folder: Path, *, weights: bool = True) -> Iterator[Path]:
    """A view that is removed at the end, for what reads the model at once. Raises as `make_view`."""
    with tempfile.TemporaryDirectory(prefix="ostinato-model-") as parent:
        yield make_view(folder, Path(parent), weights=weights)


def _written(folder: Path, names: Sequence[str]) -> Mapping[str, str]:
    """The text of each file that the view holds by itself: transformers needs a type that it knows, and
    `metadata` in an index, were it empty."""
    config = read_json(folder / CONFIG, MAX_CONFIG_BYTES)
    index = read_json(folder / INDEX) if INDEX in names else {}
    written = {CONFIG: corrected(config)} if corrected(config) != config else {}
    if index and not isinstance(index.get("metadata"), dict):
        written[INDEX] = {**index, "metadata": {}}
    return {name: json.dumps(value, indent=1) for name, value in written.items()}


def _make(view: Path, folder: Path, names: tuple[str, ...], written: Mapping[str, str]) -> None:
    """The view is there as a whole or not at all; another process may make the same one at the same time."""
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
