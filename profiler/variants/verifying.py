"""Reading a variant's bytes, checked on the way. The loader reads file by file through `read_file`.

A checksum tells a copy that went wrong; the finiteness of floating-point values is our policy for
variants: a NaN or infinity in a scale or weight would reach the logits of its requests, so it is refused
when the weights are read. PEFT's folders carry no checksums; their values are checked all the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from profiler.errors import CheckpointError
from profiler.files import read_json
from profiler.types import TensorRef
from profiler.variants.delta import DELTA, read_files
from profiler.variants.types import (
    BoftModule,
    FileRef,
    LoraModule,
    Manifest,
    SparseModule,
    SvdModule,
)

CHUNK_BYTES = 1 << 20  # still in the processor's cache when it is hashed
FINITE_BLOCK = 1 << 16  # values looked at together, for the same reason
# The bits that are all ones in infinities and NaNs, and the unsigned type of that width.
EXPONENTS: dict[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
    "F32": (np.uint32, 0x7F800000),
}


def read_file(folder: Path, file: FileRef, into: memoryview | None = None) -> memoryview:
    """The whole file, its size and checksum verified; `into`, if given, is filled from its start.

    A tensor of the file is `data[ref.offset : ref.offset + ref.size_bytes]`. Raises CheckpointError.
    """
    data = memoryview(bytearray(file.size_bytes)) if into is None else into[: file.size_bytes]
    path, digest, at = folder / file.name, hashlib.sha256(), 0
    try:
        with path.open("rb", buffering=0) as source:
            while count := source.readinto(data[at : at + CHUNK_BYTES]):
                if file.sha256 is not None:
                    digest.update(data[at : at + count])
                at += count
            longer = bool(source.read(1))
    except OSError as error:
        raise _unreadable(path, error) from error
    if at != file.size_bytes or longer:
        raise CheckpointError(f"{path} no longer has its {file.size_bytes} bytes; copy it again")
    _check_digest(path, file, digest.hexdigest())
    return data


def check_finite(data: memoryview, refs: Iterable[TensorRef], folder: Path) -> None:
    """Raises CheckpointError if a floating-point tensor in a file's `data` holds a NaN or an infinity."""
    for ref in refs:
        if ref.dtype not in EXPONENTS:
            continue
        kind, mask = EXPONENTS[ref.dtype]
        words: npt.NDArray[Any] = np.frombuffer(data[ref.offset : ref.offset + ref.size_bytes], dtype=kind)
        starts = range(0, len(words), FINITE_BLOCK)
        if any(bool(np.any((words[at : at + FINITE_BLOCK] & kind(mask)) == mask)) for at in starts):
            raise CheckpointError(
                f"{folder / ref.file}: {ref.name} holds values that are not finite; "
                "train or compress the variant again"
            )


def refs_of(module: LoraModule | BoftModule | SparseModule | SvdModule) -> Iterator[TensorRef]:
    """Every tensor of one module."""
    match module:
        case LoraModule(a=a, b=b):
            yield from (a, b)
        case BoftModule(r=r, s=s):
            yield from (r, s)
        case SparseModule(values=values, indices=indices, scales=scales):
            yield from (values, indices, scales)
        case SvdModule(groups=groups):
            factors = (factor for group in groups for factor in (group.v, group.u))
            for factor in factors:
                yield from (r for r in (factor.codes, factor.scales, factor.zeros) if r is not None)


def tensors_of(manifest: Manifest) -> Iterator[TensorRef]:
    """Every tensor the manifest speaks of."""
    for module in manifest.modules.values():
        yield from refs_of(module)
    yield from manifest.full.values()


def verify(folder: Path) -> None:
    """Check the checksums of a compressed delta's files, without its base. Raises CheckpointError."""
    for file in read_files(read_json(folder / DELTA), folder).values():
        path = folder / file.name
        try:
            with path.open("rb") as source:
                digest = hashlib.file_digest(source, "sha256").hexdigest()
        except OSError as error:
            raise _unreadable(path, error) from error
        _check_digest(path, file, digest)


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"cannot read {path}: {error.strerror}; copy it again")


def _check_digest(path: Path, file: FileRef, digest: str) -> None:
    if file.sha256 is not None and file.sha256 != digest:
        raise CheckpointError(
            f"{path} is corrupt: expected SHA-256 {file.sha256[:12]}..., got {digest[:12]}...; copy it again"
        )
