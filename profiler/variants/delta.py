"""Folders of compressed full-fine-tune deltas in our format: docs/formats.md describes it.

`delta.json` says what the folder holds; the tensors lie in one safetensors file per hidden layer and one
for the rest. In version 2 a file may be stored compressed with zstd. This module checks what both kinds of
delta share; `sparse` and `svd` check their modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from profiler.contents import SUFFIX
from profiler.errors import AdapterError, CheckpointError
from profiler.files import is_file, read_json, shown
from profiler.types import ModelSpec, TensorRef
from profiler.variants.modules import EMBEDDING, HEAD, merged_facts, require_full, total_bytes
from profiler.variants.types import FileRef, ModuleFacts, StoredFile, VariantKind, VariantSpec
from profiler.weight_files import locate_in, shard_name

DELTA = "delta.json"
FORMAT = "ostinato-delta"
VERSION = 1
ZSTD = "zstd"
ZSTD_VERSION = 2  # with files that are stored compressed
FULL_FILE = "full.safetensors"
ADDED_ROWS = "added_rows"
ADDED_ROWS_FILE = "added-rows.safetensors"

M = TypeVar("M")
Facts = Mapping[str, Any]


def layer_file(layer: int) -> str:
    """The file that holds all of one hidden layer."""
    return f"layer-{layer:05d}.safetensors"


@dataclass(frozen=True)
class Delta:
    """The checked part of delta.json that both kinds share, and where every tensor lies.

    `modules` maps full module names to what delta.json says of each; `tensors` are keyed by name and
    known to lie in the files that delta.json gives.
    """

    folder: Path
    raw: Facts
    kind: VariantKind
    files: dict[str, FileRef]
    modules: dict[str, Facts]
    tensors: dict[str, TensorRef]
    full: dict[str, TensorRef]

    @property
    def where(self) -> Path:
        return self.folder / DELTA

    def tensor(self, module: str, part: str, dtype: str, shape: tuple[int, ...]) -> TensorRef:
        """The tensor `<module>.<part>`. Raises CheckpointError unless it is there and as expected."""
        name = f"{module}.{part}"
        ref, file = self.tensors.get(name), self.modules[module]["file"]
        if ref is None or ref.file != file:
            raise CheckpointError(
                f"{self.folder / file}: expected a tensor {name}, found none; copy it again"
            )
        if (ref.dtype, ref.shape) != (dtype, shape):
            raise CheckpointError(
                f"{self.folder / file}: expected {name} to be {dtype} {shape}, got {ref.dtype} {ref.shape}; "
                "write the delta again with `ostinato compress`"
            )
        return ref

    def check_all_used(self, used: Iterable[TensorRef]) -> None:
        """Raises CheckpointError when the files hold more than delta.json speaks of."""
        extra = sorted(self.tensors.keys() - {ref.name for ref in used} - self.full.keys())
        if extra:
            raise CheckpointError(
                f"{self.folder} holds tensors that {DELTA} does not account for, such as "
                f"{', '.join(extra)[:300]}; copy the whole folder again"
            )

    def spec(
        self, base: ModelSpec, named_facts: Iterable[tuple[str, ModuleFacts]], bits: Iterable[int]
    ) -> VariantSpec:
        return VariantSpec(
            self.kind,
            total_bytes(self.tensors.values()),
            merged_facts(base, named_facts),
            tuple(sorted(set(bits), reverse=True)),
            total_bytes(self.full.values()),
            EMBEDDING in self.full,
            HEAD in self.full,
        )


def open_delta(folder: Path, base: ModelSpec) -> Delta:
    """Read delta.json and the headers of its files, and check that the delta was made for `base`.

    Raises CheckpointError when files are missing, corrupt or contradict each other, or are of another
    version; AdapterError when the delta belongs to another base.
    """
    where = folder / DELTA
    raw = read_json(where)
    kind = _kind(raw, where)
    _check_base(raw, base, where)
    files = read_files(raw, folder)
    tensors = _tensors(folder, files)
    modules = _located(raw, "modules", files, where)
    full = {name: entry["file"] for name, entry in _located(raw, "full", files, where).items()}
    return Delta(folder, raw, kind, files, modules, tensors, _full(full, tensors, base, where))


def read_files(raw: Facts, folder: Path) -> dict[str, FileRef]:
    """The files that delta.json lists, present and as long as it says. Raises CheckpointError."""
    where = folder / DELTA
    files = {}
    for name, entry in _objects(raw, "files", where).items():
        contents = _stored_file(entry, name, where)
        compressed = _compressed(entry, name, where) if raw.get("version") == ZSTD_VERSION else None
        file = FileRef(shard_name(name, where), contents.size_bytes, contents.sha256, compressed)
        _check_size(folder / file.stored_name, file.stored.size_bytes)
        files[name] = file
    return files


def _stored_file(entry: Facts, name: str, where: Path) -> StoredFile:
    size, digest = entry.get("size_bytes"), entry.get("sha256")
    if type(size) is not int or not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise CheckpointError(
            f"{where}: expected size_bytes and sha256 (hexadecimal) of {name[:80]}, got {shown(entry)}"
        )
    return StoredFile(size, digest)


def _compressed(entry: Facts, name: str, where: Path) -> StoredFile | None:
    """How a file of version 2 is stored compressed; None where it lies there as it is."""
    if "compressed" not in entry:
        return None
    compressed = entry["compressed"]
    if not isinstance(compressed, dict) or compressed.get("encoding") != ZSTD:
        raise CheckpointError(
            f"{where}: expected {name[:80]} to be compressed with encoding {ZSTD}, got {shown(compressed)}; "
            "write the delta again with this installation's `ostinato compress`, or upgrade"
        )
    return _stored_file(compressed, f"{name}{SUFFIX}", where)


def require(value: Any, check: Callable[[Any], bool], expected: str, where: Path, what: str) -> Any:
    """`value` if `check` holds for it. Raises CheckpointError."""
    if not check(value):
        raise CheckpointError(
            f"{where}: expected {what[:200]} to be {expected}, got {shown(value)}; "
            "write the delta again with `ostinato compress`"
        )
    return value


def _kind(raw: Facts, where: Path) -> VariantKind:
    if raw.get("format") != FORMAT:
        raise CheckpointError(f"{where}: expected format {FORMAT}, got {shown(raw.get('format'))}")
    if raw.get("version") not in (VERSION, ZSTD_VERSION) or type(raw["version"]) is not int:
        raise CheckpointError(
            f"{where}: expected version {VERSION} or {ZSTD_VERSION}, got {shown(raw.get('version'))}; "
            "write the delta again with this installation's `ostinato compress`, or upgrade"
        )
    kind = raw.get("kind")
    if kind not in (VariantKind.SPARSE_DELTA.value, VariantKind.SVD_DELTA.value):
        raise CheckpointError(f"{where}: expected kind sparse_delta or svd_delta, got {shown(kind)}")
    return VariantKind(kind)


def _check_base(raw: Facts, base: ModelSpec, where: Path) -> None:
    claimed = raw.get("base")
    mark = claimed.get("fingerprint") if isinstance(claimed, dict) else None
    if not isinstance(mark, str) or not re.fullmatch("[0-9a-f]{64}", mark):
        raise CheckpointError(f"{where}: expected base.fingerprint to have 64 hexadecimal digits")
    if not base.fingerprint:
        raise AdapterError(
            f"{where}: the base was registered without a fingerprint; delete it and register it again"
        )
    if mark != base.fingerprint:
        raise AdapterError(
            f"{where}: the delta was made from the base {mark[:12]}..., "
            f"this one is {base.fingerprint[:12]}...; "
            "register it with the very checkpoint it was compressed against"
        )


def _objects(raw: Facts, key: str, where: Path) -> dict[str, dict[str, Any]]:
    value = raw.get(key)
    if not isinstance(value, dict) or not all(isinstance(entry, dict) for entry in value.values()):
        raise CheckpointError(f"{where}: expected {key} to map names to objects, got {shown(value)}")
    return value


def _located(raw: Facts, key: str, files: dict[str, FileRef], where: Path) -> dict[str, Facts]:
    entries: dict[str, Facts] = {}
    for name, entry in _objects(raw, key, where).items():
        file = entry.get("file")
        if not isinstance(file, str) or file not in files:
            raise CheckpointError(
                f"{where}: {key} puts {name[:200]} into {shown(file)}, which files does not list"
            )
        entries[name] = entry
    return entries


def _check_size(path: Path, expected: int) -> None:
    if not is_file(path):
        raise CheckpointError(
            f"expected a file {path.name} in {path.parent}, found none; copy the whole folder"
        )
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; check its permissions") from error
    if size != expected:
        raise CheckpointError(f"{path} has {size} bytes, {DELTA} says {expected}; copy it again")


def _tensors(folder: Path, files: dict[str, FileRef]) -> dict[str, TensorRef]:
    tensors: dict[str, TensorRef] = {}
    for file, stored in files.items():
        contents_bytes = stored.size_bytes if stored.compressed else None
        for name, ref in locate_in(folder, file, contents_bytes).items():
            if name in tensors:
                raise CheckpointError(
                    f"{folder}: {name[:200]!r} lies in both {file} and {tensors[name].file}"
                )
            tensors[name] = ref
    return tensors


def _full(
    places: dict[str, str], tensors: dict[str, TensorRef], base: ModelSpec, where: Path
) -> dict[str, TensorRef]:
    full = {}
    for name, file in places.items():
        ref = tensors.get(name)
        if ref is None or ref.file != file:
            raise CheckpointError(f"{where}: {name[:200]} should lie in {file}, but does not; copy it again")
        require_full(ref, name, base, str(where))
        full[name] = ref
    return full
