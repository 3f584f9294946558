"""Reading a variant's bytes with checks.

Registration reads all bytes once and keeps none (`verify_data`). The loader reads file by file through
`read_file` and checks again, because files change.

A checksum detects a faulty copy. That floating-point values are finite is our policy for variants: a NaN or
infinity in a scale or weight would reach the logits of its requests, so it is refused when the weights are
read. PEFT's folders have no checksums; their values are checked, too.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import assert_never

import numpy as np

from profiler.contents import Source, opened
from profiler.errors import CheckpointError
from profiler.files import read_json
from profiler.inside import open_file
from profiler.types import TensorRef
from profiler.variants.delta import DELTA, read_files
from profiler.variants.finite import EXPONENTS, not_finite
from profiler.variants.types import (
    BoftModule,
    FileRef,
    LoraModule,
    Manifest,
    SparseModule,
    SvdModule,
)

CHUNK_BYTES = 1 << 20  # small enough to stay in the processor's cache until it is hashed
STRETCH_ALIGNMENT = 128  # bytes; more than any value has


def read_file(folder: Path, file: FileRef) -> memoryview:
    """Read a whole file and verify its size and checksum.

    A tensor of the file is `data[ref.offset : ref.offset + ref.size_bytes]`. Raises CheckpointError.
    """
    data = memoryview(bytearray(file.size_bytes))
    read_unverified(folder, file, data)
    check_digest(folder, file, data)
    return data


def read_unverified(folder: Path, file: FileRef, into: memoryview) -> None:
    """Read the whole file to the start of `into` and verify its size; the caller calls `check_digest` itself.
    Raises CheckpointError."""
    path = folder / file.stored_name
    try:
        with opened(path, file.size_bytes) as source:
            whole = source.fill(into[: file.size_bytes]) == file.size_bytes and source.at_end()
    except OSError as error:
        raise _unreadable(path, error) from error
    if not whole:
        raise _other_size(path, file)


def check_digest(folder: Path, file: FileRef, data: memoryview) -> None:
    """Raise CheckpointError if a file's `data` does not have the expected checksum."""
    if file.sha256 is not None:  # in one call, because a thread may wait for Python before each call
        _check_digest(folder / file.stored_name, file.sha256, hashlib.sha256(data).hexdigest())


def read_stretches(
    folder: Path, file: FileRef, refs: Iterable[TensorRef], into: memoryview
) -> dict[TensorRef, int]:
    """Read tensors of an uncompressed file into `into`; return where each begins there, at a multiple of its
    values' bytes. Neighbours of one type are read at once. `stretches_bytes` is the needed room.

    The file's size is verified, the values are not. Raises CheckpointError.
    """
    begins, at = dict[TensorRef, int](), 0
    with _stored_as_it_is(folder, file) as fill:
        for stretch in _neighbours(refs):
            first, size = stretch[0].offset, sum(ref.size_bytes for ref in stretch)
            fill(first, into[at : at + size])
            begins |= {ref: at + ref.offset - first for ref in stretch}
            at += _rounded_up(size)
    return begins


@contextmanager
def _stored_as_it_is(folder: Path, file: FileRef) -> Iterator[Callable[[int, memoryview], None]]:
    """A function that fills memory from any byte of a file of the expected size. Raises CheckpointError."""
    path = folder / file.name
    try:
        with open_file(path) as raw:
            source = Source(os.fstat(raw.fileno()).st_size, raw.readinto)

            def fill(offset: int, into: memoryview) -> None:
                raw.seek(offset)
                if source.fill(into) != len(into):
                    raise _other_size(path, file)

            if source.size_bytes != file.size_bytes:
                raise _other_size(path, file)
            yield fill
    except OSError as error:
        raise _unreadable(path, error) from error


def stretches_bytes(refs: Iterable[TensorRef]) -> int:
    """An upper bound of the room that `read_stretches` needs."""
    return sum(_rounded_up(ref.size_bytes) for ref in refs)


def _rounded_up(size: int) -> int:
    return -(-size // STRETCH_ALIGNMENT) * STRETCH_ALIGNMENT


def _neighbours(refs: Iterable[TensorRef]) -> Iterator[list[TensorRef]]:
    """The tensors in the file's order; consecutive tensors of one type form one list."""
    stretch: list[TensorRef] = []
    for ref in sorted(refs, key=lambda ref: ref.offset):
        last = stretch[-1] if stretch else None
        if last and (ref.dtype, ref.offset) != (last.dtype, last.offset + last.size_bytes):
            yield stretch
            stretch = []
        stretch.append(ref)
    if stretch:
        yield stretch


def not_finite_error(folder: Path, ref: TensorRef, at: int) -> CheckpointError:
    """The error for a tensor whose value number `at` is a NaN or an infinity."""
    index = ", ".join(str(int(i)) for i in np.unravel_index(at, ref.shape))
    return CheckpointError(
        f"{folder / ref.file}: {ref.name} has a value that is not finite at [{index}]; "
        "train or compress the variant again"
    )


def check_finite(data: memoryview, refs: Iterable[TensorRef], folder: Path) -> None:
    """Raise CheckpointError if a floating-point tensor in a file's `data` holds a NaN or an infinity."""
    for ref in refs:
        check_values(data[ref.offset : ref.offset + ref.size_bytes], ref, folder)


def check_values(data: memoryview, ref: TensorRef, folder: Path) -> None:
    """As `check_finite`, for one tensor's `data`."""
    at = not_finite(data, ref.dtype)
    if at is not None:
        raise not_finite_error(folder, ref, at)


def verify_data(manifest: Manifest) -> None:
    """Read every file of a variant once, piece by piece; check sizes, checksums, and that values are finite.

    Raises CheckpointError, which names the file, or the tensor and the place in it. If a file has a wrong
    checksum and a value that is not finite, the error reports the checksum.
    """
    refs: dict[str, list[TensorRef]] = defaultdict(list)
    for ref in tensors_of(manifest):
        refs[ref.file].append(ref)
    for file in manifest.files:
        _verify_file(manifest.folder, file, refs[file.name])


def _verify_file(folder: Path, file: FileRef, refs: Iterable[TensorRef]) -> None:
    path, digest, fault = folder / file.stored_name, hashlib.sha256(), None
    try:
        with opened(path, file.size_bytes) as source:
            for ref, start, piece in _pieces(source, path, file, refs):
                digest.update(piece)
                if ref is not None and fault is None and (at := not_finite(piece, ref.dtype)) is not None:
                    fault = not_finite_error(folder, ref, start // _value_bytes(ref) + at)
            if not source.at_end():
                raise _other_size(path, file)
    except OSError as error:
        raise _unreadable(path, error) from error
    _check_digest(path, file.sha256, digest.hexdigest())
    if fault is not None:
        raise fault


def _pieces(
    source: Source, path: Path, file: FileRef, refs: Iterable[TensorRef]
) -> Iterator[tuple[TensorRef | None, int, memoryview]]:
    """All bytes of a file in order, in pieces: (their tensor or None, their offset in it, the bytes).

    The bytes are valid until the next piece. Raises CheckpointError when the file ends too soon.
    """
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for ref, begin, end in _stretches(file, refs):
        for at in range(begin, end, CHUNK_BYTES):
            piece = buffer[: min(CHUNK_BYTES, end - at)]
            if source.fill(piece) != len(piece):
                raise _other_size(path, file)
            yield ref, at - begin, piece


def _stretches(file: FileRef, refs: Iterable[TensorRef]) -> Iterator[tuple[TensorRef | None, int, int]]:
    """The tensors of a file and the gaps between them, each with its first byte and the byte after its
    last."""
    at = 0
    for ref in sorted(refs, key=lambda ref: ref.offset):
        yield None, at, ref.offset
        at = ref.offset + ref.size_bytes
        yield ref, ref.offset, at
    yield None, at, file.size_bytes


def _value_bytes(ref: TensorRef) -> int:
    return EXPONENTS[ref.dtype][0]().itemsize


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
        case unknown:
            assert_never(unknown)


def tensors_of(manifest: Manifest) -> Iterator[TensorRef]:
    """Every tensor that the manifest names."""
    for module in manifest.modules.values():
        yield from refs_of(module)
    yield from manifest.full.values()
    for difference in manifest.differences.values():
        yield from difference.tensors


def verify(folder: Path) -> None:
    """Check the checksums of a compressed delta's files as they are stored; its base is not needed. Raises
    CheckpointError."""
    for file in read_files(read_json(folder / DELTA), folder).values():
        path = folder / file.stored_name
        try:
            with open_file(path) as source:
                digest = hashlib.file_digest(source, "sha256").hexdigest()
        except OSError as error:
            raise _unreadable(path, error) from error
        _check_digest(path, file.stored.sha256, digest)


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"cannot read {path}: {error.strerror}; copy it again")


def _other_size(path: Path, file: FileRef) -> CheckpointError:
    holds = "has" if file.compressed is None else "decompresses to"
    return CheckpointError(f"{path} no longer {holds} its {file.size_bytes} bytes; copy it again")


def _check_digest(path: Path, expected: str | None, digest: str) -> None:
    if expected is not None and expected != digest:
        raise CheckpointError(
            f"{path} is corrupt: expected SHA-256 {expected[:12]}..., got {digest[:12]}...; copy it again"
        )
