"""Folders of compressed full-fine-tune deltas in our format: docs/formats.md describes it.

`delta.json` lists what the folder holds; the tensors lie in one safetensors file per hidden layer and one for
the rest. From version 2 on a file may be stored compressed with zstd. From version 3 on embedding and head
may be differences from the base's. This module checks what both kinds of delta share; `sparse` and `svd`
check their modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from profiler.contents import SUFFIX
from profiler.errors import AdapterError, CheckpointError
from profiler.files import is_file, read_json, refuse_lookalike, shown
from profiler.types import ModelSpec, TensorRef
from profiler.variants.modules import EMBEDDING, HEAD, full_shape, merged_facts, require_full, total_bytes
from profiler.variants.types import Difference, FileRef, ModuleFacts, StoredFile, VariantKind, VariantSpec
from profiler.weight_files import locate_in, shard_name

DELTA = "delta.json"
FORMAT = "ostinato-delta"
VERSION = 1
ZSTD = "zstd"
ZSTD_VERSION = 2  # adds files that are stored compressed
DIFFERENCE_VERSION = 3  # adds tensors that are stored as differences
VERSIONS = (VERSION, ZSTD_VERSION, DIFFERENCE_VERSION)
DIFFERENCES = "differences"
CODES, SCALES = ".codes", ".scales"  # endings of the names of a difference's two tensors
DIFFERENCE_BITS = 8
FULL_FILE = "full.safetensors"
ADDED_ROWS = "added_rows"
ADDED_ROWS_FILE = "added-rows.safetensors"

M = TypeVar("M")
Facts = Mapping[str, Any]


def layer_file(layer: int) -> str:
    """The name of the file that holds one hidden layer."""
    return f"layer-{layer:05d}.safetensors"


@dataclass(frozen=True)
class Delta:
    """The checked part of delta.json that both kinds share, and the place of every tensor.

    `modules` maps full module names to their entries in delta.json; `tensors` are keyed by name and lie in
    the files that delta.json names.
    """

    folder: Path
    raw: Facts
    kind: VariantKind
    files: dict[str, FileRef]
    modules: dict[str, Facts]
    tensors: dict[str, TensorRef]
    full: dict[str, TensorRef]
    differences: dict[str, Difference]

    @property
    def where(self) -> Path:
        return self.folder / DELTA

    def tensor(self, module: str, part: str, dtype: str, shape: tuple[int, ...]) -> TensorRef:
        """The tensor `<module>.<part>`. Raises CheckpointError if it is missing or not as expected."""
        file = self.modules[module]["file"]
        return _tensor(self.tensors, self.folder / file, f"{module}.{part}", dtype, shape)

    def check_all_used(self, used: Iterable[TensorRef]) -> None:
        """Raise CheckpointError when the files hold tensors that delta.json does not mention."""
        replacing = {ref.name for ref in self._replacing()}
        extra = sorted(self.tensors.keys() - {ref.name for ref in used} - replacing)
        if extra:
            raise CheckpointError(
                f"{self.folder} has tensors that {DELTA} does not list, such as "
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
            total_bytes(self._replacing()),
            EMBEDDING in self.full or EMBEDDING in self.differences,
            HEAD in self.full or HEAD in self.differences,
        )

    def _replacing(self) -> Iterator[TensorRef]:
        """The tensors that define replacements for the base's tensors."""
        yield from self.full.values()
        for difference in self.differences.values():
            yield from difference.tensors


def _tensor(
    tensors: Mapping[str, TensorRef], path: Path, name: str, dtype: str, shape: tuple[int, ...]
) -> TensorRef:
    """The tensor. Raises CheckpointError unless the file `path` holds it with this type and shape."""
    ref = tensors.get(name)
    if ref is None or ref.file != path.name:
        raise CheckpointError(f"{path}: expected a tensor {name[:200]}, found none; copy it again")
    if (ref.dtype, ref.shape) != (dtype, shape):
        raise CheckpointError(
            f"{path}: expected {name[:200]} to be {dtype} {shape}, got {ref.dtype} {ref.shape}; "
            "write the delta again with `ostinato compress`"
        )
    return ref


def open_delta(folder: Path, base: ModelSpec) -> Delta:
    """Read delta.json and the headers of its files, and check that the delta was made for `base`.

    Raises CheckpointError when files are missing, corrupt, contradictory or of another version; AdapterError
    when the delta belongs to another base.
    """
    where = folder / DELTA
    raw = read_json(where)
    kind = _kind(raw, where)
    _check_base(raw, base, where)
    files = read_files(raw, folder)
    tensors = _tensors(folder, files)
    modules = _located(raw, "modules", files, where)
    full = {name: entry["file"] for name, entry in _located(raw, "full", files, where).items()}
    whole = _full(full, tensors, base, where)
    differences = _differences(raw, files, tensors, base, folder)
    if both := sorted(whole.keys() & differences.keys()):
        raise CheckpointError(
            f"{where}: {both[0]} is stored both whole and as a difference; write the delta again"
        )
    return Delta(folder, raw, kind, files, modules, tensors, whole, differences)


def read_files(raw: Facts, folder: Path) -> dict[str, FileRef]:
    """The files that delta.json lists; each exists with the listed size. Raises CheckpointError."""
    files = listed_files(raw, folder)
    for file in files.values():
        _check_size(folder / file.stored_name, file.stored.size_bytes)
    return files


def listed_files(raw: Facts, folder: Path) -> dict[str, FileRef]:
    """The files that delta.json lists, which are not looked at. Raises CheckpointError."""
    where = folder / DELTA
    files = {}
    for name, entry in _objects(raw, "files", where).items():
        contents = _stored_file(entry, name, where)
        compressed = _compressed(entry, name, where) if raw.get("version") != VERSION else None
        files[name] = FileRef(shard_name(name, where), contents.size_bytes, contents.sha256, compressed)
    return files


def _stored_file(entry: Facts, name: str, where: Path) -> StoredFile:
    size, digest = entry.get("size_bytes"), entry.get("sha256")
    if type(size) is not int or not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise CheckpointError(
            f"{where}: expected size_bytes and sha256 (hexadecimal) of {name[:80]}, got {shown(entry)}"
        )
    return StoredFile(size, digest)


def _compressed(entry: Facts, name: str, where: Path) -> StoredFile | None:
    """How a file is stored compressed; None if it is not compressed."""
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
        raise CheckpointError(
            f"{where}: expected format {FORMAT}, got {shown(raw.get('format'))}; give the folder of a delta"
        )
    if raw.get("version") not in VERSIONS or type(raw["version"]) is not int:
        raise CheckpointError(
            f"{where}: expected version {VERSION} to {DIFFERENCE_VERSION}, got {shown(raw.get('version'))}; "
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
            f"{where}: the delta was made from the base {mark[:12]}..., but this base is "
            f"{base.fingerprint[:12]}...; register the delta with exactly the checkpoint that it was made "
            "from"
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
                f"{where}: {key} puts {name[:200]} into {shown(file)}, which is missing in files; copy the "
                "whole folder again"
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
        refuse_lookalike(path)
        raise CheckpointError(f"{path} has {size} bytes, but {DELTA} says {expected}; copy it again")


def _tensors(folder: Path, files: dict[str, FileRef]) -> dict[str, TensorRef]:
    tensors: dict[str, TensorRef] = {}
    for file, stored in files.items():
        contents_bytes = stored.size_bytes if stored.compressed else None
        for name, ref in locate_in(folder, file, contents_bytes).items():
            if name in tensors:
                raise CheckpointError(
                    f"{folder}: {name[:200]!r} is both in {file} and in {tensors[name].file}; copy the whole "
                    "folder again"
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
            raise CheckpointError(
                f"{where}: expected {name[:200]} in {file}, found it elsewhere; copy the whole folder again"
            )
        require_full(ref, name, base, str(where))
        full[name] = ref
    return full


def _differences(
    raw: Facts, files: dict[str, FileRef], tensors: dict[str, TensorRef], base: ModelSpec, folder: Path
) -> dict[str, Difference]:
    where, found = folder / DELTA, {}
    if raw["version"] != DIFFERENCE_VERSION:
        return {}
    for name, entry in _located(raw, DIFFERENCES, files, where).items():
        shape = full_shape(name, base) if name in (EMBEDDING, HEAD) else None
        if shape is None:
            raise AdapterError(
                f"{where}: only embedding and head can be stored as a difference, got {name[:200]!r}; write "
                "the delta again"
            )
        require(entry.get("bits"), lambda b: b == DIFFERENCE_BITS, "8", where, f"the bits of {name}")
        path = folder / entry["file"]
        codes = _tensor(tensors, path, f"{name}{CODES}", "I8", shape)
        found[name] = Difference(codes, _tensor(tensors, path, f"{name}{SCALES}", "F32", shape[:1]))
    return found
