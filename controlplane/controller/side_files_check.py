"""Registration tries a model's tokenizer and chat templates before any engine or client uses them.

A process with limits does it (`workers.engine.side_files_check`), a new one for each model, because it has
run untrusted code. Results are remembered for the same files.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from controlplane import errors
from controlplane.controller import sources
from controlplane.controller.child_process import ChildProcess, ReaderDied
from controlplane.controller.registration import Limits
from controlplane.state.records import Model
from profiler.errors import CheckpointError
from profiler.files import is_file
from profiler.inside import open_file
from profiler.model_files import CONFIG, TEMPLATES, small_files
from profiler.variants.side_files import MAX_FILE_BYTES, SETTINGS
from profiler.variants.side_files import TEMPLATES as MODEL_TEMPLATES
from workers.engine.side_files_check import Asked, Found

CHILD = "workers.engine.side_files_check"
WALL_S = 1800.0  # the process limits its CPU time itself
REMEMBERED = 512  # sets of files
TOKENIZERS = ("tokenizer.json", "tokenizer.model")


@dataclass
class SideFilesCheck:
    """`check` may be called from any number of threads."""

    _found: OrderedDict[str, Found] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, model: Model, base: Model | None, limits: Limits) -> Model:
        """A model that was read, with notes for its users about its tokenizer in its `reason`.

        Errors: SourceUnreadable. Raises ReaderDied when the process was killed for a reason other than the
        files.
        """
        folder = model.delta.tuned if model.path is None and model.delta is not None else model.path
        if not folder or sources.bundled_name(model.source or ""):
            return model
        of_base = base.path or "" if base is not None and model.path is not None else ""
        found = self._known(
            Asked(folder, of_base, "", tuple(map(str, limits.roots)), limits.compare_tokenizers)
        )
        if found.refused:
            raise errors.SourceUnreadable(found.refused, param="adapter" if model.adapter else "source")
        return replace(model, reason="; ".join(filter(None, (model.reason, *found.told))))

    def _known(self, asked: Asked) -> Found:
        """The result for these files: remembered from an earlier check, or from the process now."""
        try:
            if not _is_needed(asked):
                return Found()
            digest = _digest(asked)
        except CheckpointError as e:
            return Found(refused=str(e))
        with self._lock:
            if digest in self._found:
                self._found.move_to_end(digest)
                return self._found[digest]
        found = _ask(asked)
        with self._lock:
            self._found[digest] = found
            while len(self._found) > REMEMBERED:
                self._found.popitem(last=False)
        return found


def _is_needed(asked: Asked) -> bool:
    """Whether the folder has a template, expressions, or ids that a tokenizer class may change."""
    folder = Path(asked.folder)
    if any(is_file(folder / name) for name in MODEL_TEMPLATES) or (folder / TEMPLATES).is_dir():
        return True
    if is_file(folder / SETTINGS) and b'"chat_template"' in _bytes(folder / SETTINGS, asked):
        return True
    if asked.compare and any(is_file(folder / name) for name in TOKENIZERS):
        return True
    return is_file(folder / TOKENIZERS[0]) and b'"Regex"' in _bytes(folder / TOKENIZERS[0], asked)


def _digest(asked: Asked) -> str:
    digest = hashlib.sha256(f"{asked.compare} {bool(asked.base)}".encode())
    for folder in filter(None, (asked.folder, asked.base)):
        for name in small_files(Path(folder)):
            if asked.base and name == CONFIG:
                continue  # no config affects a variant's tokenizer
            digest.update(
                f"{name} {hashlib.sha256(_bytes(Path(folder) / name, asked)).hexdigest()} ".encode()
            )
    return digest.hexdigest()


def _bytes(where: Path, asked: Asked) -> bytes:
    roots = tuple(map(Path, (*asked.roots, *filter(None, (asked.base,))))) if asked.roots else ()
    try:
        with open_file(where, roots) as file:
            raw = file.read(MAX_FILE_BYTES + 1) or b""
    except OSError as e:
        raise CheckpointError(f"cannot read {where}: {e.strerror}; check its permissions") from e
    if len(raw) > MAX_FILE_BYTES:
        raise CheckpointError(
            f"{where} has more than the allowed {MAX_FILE_BYTES} bytes; copy the model's own file there"
        )
    return raw


def _ask(asked: Asked) -> Found:
    scratch = tempfile.mkdtemp(prefix="ostinato-check-")
    process = ChildProcess(CHILD, quiet=True)
    doing: dict[str, Any] = {}
    try:
        process.send(json.dumps(asdict(replace(asked, scratch=scratch))).encode())
        for line in _lines(process):
            if "doing" not in line:
                return Found(tuple(line["told"]), line["refused"])
            doing = line
        raise AssertionError("unreachable: lines end with an error")
    except ReaderDied as e:
        if not (e.out_of_time and doing):
            raise
        return Found(
            refused=f"{doing['doing']} took more than {doing['cpu_s']} s of CPU time; make it simpler, or "
            "copy the original file"
        )
    finally:
        process.kill()
        shutil.rmtree(scratch, ignore_errors=True)


def _lines(process: ChildProcess) -> Iterator[dict[str, Any]]:
    ends_s = time.monotonic() + WALL_S
    while True:
        line: dict[str, Any] = json.loads(process.line(ends_s))
        yield line
