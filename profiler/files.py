"""Reading JSON files and safetensors headers. Never reads tensor data, never unpickles anything.

Everything here raises only `CheckpointError`, whatever the bytes are.
"""

from __future__ import annotations

import codecs
import json
import math
import os
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from profiler import advice
from profiler.contents import opened
from profiler.errors import CheckpointError
from profiler.inside import open_file
from profiler.lookalikes import FIRST_BYTES, lookalike

# safetensors itself allows 100 MB. A file that holds all of Qwen3-235B (36,000 tensors) has a header of 5 MB.
MAX_HEADER_BYTES = 16 << 20
MAX_JSON_BYTES = 32_000_000
MAX_CONFIG_BYTES = 4 << 20  # of a config.json or adapter_config.json; large models' files have 10 KB
MAX_TOKENS = 1_000_000  # of JSON: brackets, colons, commas. A header of 36,000 tensors has 430,000
MAX_DIMENSION = 2**40
MAX_DIMENSIONS = 8

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8,
}  # fmt: skip
FLOAT_DTYPES = frozenset({"F32", "F16", "BF16"})


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its header describes it. `start` and `end` are byte offsets into the data part."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.end - self.start


def is_file(path: Path) -> bool:
    """True for a regular file (a link to a file counts). Names that the system refuses count as absent."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def shown(value: Any, limit: int = 60) -> str:
    """Untrusted JSON as text for a message: short, and safe however deeply it is nested."""
    try:
        return str(value)[:limit]
    except (RecursionError, ValueError):
        return f"a {type(value).__name__}"


def _absent(path: Path) -> CheckpointError:
    return CheckpointError(
        f"expected a file {path.name} in {path.parent}, found none; copy the whole folder again, or run "
        f"{advice.download(path.parent)}"
    )


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES, roots: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The JSON object in `path`; `roots`: as in `open_file`. Raises CheckpointError when it is absent, too
    large or not an object."""
    raw = _read(path, max_bytes, roots)
    if raw.startswith(codecs.BOM_UTF8):
        raise CheckpointError(
            f"{path} begins with a byte-order mark, so transformers cannot read it; remove the mark: "
            f"`sed -i '1s/^\\xEF\\xBB\\xBF//' {advice.quoted(path)}`, and register the folder again"
        )
    mend = f"correct it in an editor, or download it again: {advice.download(path.parent, path.name)}"
    return parse_json(raw, str(path), mend)


def read_text(path: Path, max_bytes: int) -> str:
    """The UTF-8 text in `path`. Raises CheckpointError when it is absent, too large or not UTF-8."""
    try:
        return _read(path, max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text ({error}); copy or download it again") from error


def _read(path: Path, max_bytes: int, roots: tuple[Path, ...] = ()) -> bytes:
    if not is_file(path):
        raise _absent(path)
    try:
        with open_file(path, roots) as file:
            size = os.fstat(file.fileno()).st_size
            if size > max_bytes:
                raise CheckpointError(
                    f"{path} has {size} bytes, but at most {max_bytes} are allowed; copy the right file there"
                )
            raw = b"".join(iter(lambda: file.read(max_bytes), b""))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; check its permissions") from error
    if problem := lookalike(raw, path):
        raise CheckpointError(problem)
    return raw


def refuse_lookalike(path: Path) -> None:
    """Raise CheckpointError if a file's first bytes show that it is something else, such as a git-lfs
    pointer."""
    try:
        with open_file(path) as file:
            start = file.read(FIRST_BYTES) or b""
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; check its permissions") from error
    if problem := lookalike(start, path):
        raise CheckpointError(problem)


def parse_json(raw: bytes, where: str, mend: str) -> dict[str, Any]:
    """Parse a JSON object without repeated keys, with at most MAX_TOKENS tokens and finite numbers.

    Raises CheckpointError; for text that is not JSON the message ends with `mend`, which says what to do.
    """
    tokens = sum(map(raw.count, (b"{", b"[", b":", b",")))
    if tokens > MAX_TOKENS:
        raise CheckpointError(
            f"{where} has {tokens} brackets, colons and commas, but at most {MAX_TOKENS} are allowed; copy "
            "the right file there"
        )
    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}; {mend}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"expected a JSON object in {where}, got {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice[:60]!r} occurs twice")
    return made


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def read_layout(path: Path, contents_bytes: int | None = None) -> tuple[dict[str, TensorInfo], int]:
    """The tensors of one safetensors file, by name, and the byte at which its data part starts.

    Layout: 8 bytes little-endian header length, the JSON header, the data. As the format demands, the
    tensors must fill the data part exactly: no holes, no overlaps, nothing after the last tensor.
    `contents_bytes` is the size of the contents of a file that is stored compressed (`contents`).
    Raises CheckpointError.
    """
    if not is_file(path):
        raise _absent(path)
    refuse_lookalike(path)
    try:
        with opened(path, contents_bytes) as source:
            size = source.size_bytes
            header = source.read(_header_length(source.read(8), size, path))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; check its permissions") from error
    entries = parse_json(header, f"the header of {path}", "the file is damaged: download or copy it again")
    _check_metadata(entries.pop("__metadata__", {}), path)
    tensors = {name: _tensor(name, entry, path) for name, entry in entries.items()}
    _check_layout(tensors, size - 8 - len(header), path)
    return tensors, 8 + len(header)


def _check_metadata(metadata: Any, path: Path) -> None:
    """Check that metadata values are texts, as the safetensors library requires. Raises CheckpointError."""
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(
            f"{path}: expected every value of its __metadata__ to be a text, got {shown(metadata)}; remove "
            f"the metadata, which models do not need: {advice.without_metadata(path)} (a script that writes "
            "such "
            'files should call `save_file(tensors, file, metadata={"format": "pt"})`)'
        )


def _header_length(prefix: bytes, size: int, path: Path) -> int:
    if len(prefix) < 8:
        raise CheckpointError(f"{path} has {len(prefix)} bytes, too few for safetensors; copy it again")
    length: int = struct.unpack("<Q", prefix)[0]
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} claims a header of {length} bytes, but at most {MAX_HEADER_BYTES} are allowed: this is "
            "not a safetensors file, or it is damaged; download or copy it again"
        )
    if length > size - 8:
        raise CheckpointError(f"{path} is truncated: header of {length} bytes, file of {size}; copy it again")
    return length


def _tensor(name: str, entry: Any, path: Path) -> TensorInfo:
    where = f"tensor {name[:200]!r} in {path}"
    if not isinstance(entry, dict):
        raise CheckpointError(
            f"expected {where} to be described by an object, got {type(entry).__name__}; copy the file again"
        )
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{where} has dtype {shown(dtype)!r}; expected one of {', '.join(DTYPE_BYTES)}")
    if not _naturals(shape) or len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(f"{where} has an impossible shape {shown(shape)}; copy the file again")
    if not _naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where} has impossible data_offsets {shown(offsets)}; copy the file again")
    info = TensorInfo(dtype, tuple(shape), offsets[0], offsets[1])
    if info.size_bytes != info.elements * DTYPE_BYTES[dtype]:
        raise CheckpointError(
            f"{where} needs {info.elements * DTYPE_BYTES[dtype]} bytes for shape {info.shape} of {dtype}, "
            f"but its offsets span {info.size_bytes}; copy the file again"
        )
    return info


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= MAX_DIMENSION for n in value)


def _check_layout(tensors: dict[str, TensorInfo], data_bytes: int, path: Path) -> None:
    at = 0
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start != at:
            fault = "overlaps the tensor before it" if info.start < at else "leaves a hole before it"
            raise CheckpointError(
                f"{path} is corrupt: tensor {name[:200]!r} at byte {info.start} {fault}; copy it again"
            )
        at = info.end
    if at != data_bytes:
        fault = "truncated" if at > data_bytes else "corrupt"
        raise CheckpointError(
            f"{path} is {fault}: its tensors end at byte {at}, but its data at {data_bytes}; copy it again"
        )
