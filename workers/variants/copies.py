"""Copies of a variant's matrices whose file layout needs no other preparation: threads read, verify and copy.

Each thread reads its share of the file in a few long stretches. Then it copies all of it in one compiled
call, so that threads seldom wait for the GIL. A kind whose weights need more than copies fills them itself
(`LayerWeights.fill`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from profiler.types import TensorRef
from profiler.variants.verifying import not_finite_error, read_stretches, stretches_bytes
from workers.kernels import copying
from workers.kernels.types import Part
from workers.variants.loader_threads import Job
from workers.variants.tensors import DTYPES, Buffers, File

LEAST_BYTES = 1 << 20  # of a share: a smaller one is not worth a thread's start
MOST_BYTES = 16 << 20  # one thread's memory at a time; other variants' shares wait meanwhile
SHARES = 2  # per thread: if one share is delayed, other threads take the rest


@dataclass(frozen=True)
class MatrixCopy:
    """A copy of rows and columns of a matrix to rows of `part` from `first_row` on.

    Values get the part's type, and are multiplied by `scaling`; if `transposed`, columns of the matrix are
    rows of the part.
    """

    file: File
    ref: TensorRef
    rows: slice
    columns: slice
    part: Part
    first_row: int = 0
    scaling: float = 1.0
    transposed: bool = False


PlacedCopy = tuple[MatrixCopy, int]  # and the byte of the variant's memory at which its part begins


def possible(file: File, refs: Iterable[TensorRef], dtype: torch.dtype) -> bool:
    """Whether these matrices can be copied to values of `dtype`.

    Their file must be stored uncompressed, and without a checksum, which covers the whole file.
    """
    plain = file.ref.sha256 is None and file.ref.compressed is None
    return plain and dtype in copying.TYPES and all(DTYPES.get(ref.dtype) in copying.TYPES for ref in refs)


def jobs(placed: Sequence[PlacedCopy], memory: torch.Tensor, buffers: Buffers, threads: int) -> list[Job]:
    """The jobs of all copies: about SHARES per thread, or more if a share would exceed MOST_BYTES."""
    total = sum(copy.ref.size_bytes for copy, _ in placed)
    share = min(MOST_BYTES, max(LEAST_BYTES, -(-total // (SHARES * threads))))
    return [partial(_carry_out, own, memory, buffers) for own in _shares(placed, share)]


def _shares(placed: Sequence[PlacedCopy], share: int) -> list[list[PlacedCopy]]:
    """Shares of about `share` bytes; each is of one file, in the file's order."""
    shares: list[list[PlacedCopy]] = []
    taken, file = 0, None
    for copy, start in sorted(placed, key=lambda p: (p[0].ref.file, p[0].ref.offset)):
        if not shares or taken >= share or copy.file is not file:
            shares.append([])
            taken, file = 0, copy.file
        shares[-1].append((copy, start))
        taken += copy.ref.size_bytes
    return shares


def _carry_out(placed: Sequence[PlacedCopy], memory: torch.Tensor, buffers: Buffers) -> None:
    """Read one share and copy it. Raises CheckpointError if the file is invalid."""
    file, refs = placed[0][0].file, [copy.ref for copy, _ in placed]
    with buffers.borrowed(stretches_bytes(dict.fromkeys(refs))) as read:
        begins = read_stretches(file.folder, file.ref, dict.fromkeys(refs), read.data)
        copies = [_described(copy, begins[copy.ref], start) for copy, start in placed]
        if (found := copying.copy(copies, read, memory.numpy())) is not None:
            raise not_finite_error(file.folder, refs[found[0]], found[1])


def _described(copy: MatrixCopy, source: int, start: int) -> copying.Copy:
    rows, columns = (
        range(size)[cut] for size, cut in zip(copy.ref.shape, (copy.rows, copy.columns), strict=True)
    )
    room, width = copy.part.shape
    lines, line = (columns, rows) if copy.transposed else (rows, columns)
    if copy.first_row + len(lines) > room or len(line) != width:
        raise ValueError(
            f"{copy.ref.name} has {len(lines)} rows of {len(line)}; {copy.part.name} has {room} of {width},"
            f" of which these begin at {copy.first_row}."
        )
    return copying.Copy(
        source=source,
        source_type=copying.TYPES[DTYPES[copy.ref.dtype]],
        values=copy.ref.shape[0] * copy.ref.shape[1],
        width=copy.ref.shape[1],
        first_row=rows.start,
        rows=len(rows),
        first_column=columns.start,
        columns=len(columns),
        into=start + copy.first_row * width * copy.part.dtype.itemsize,
        into_type=copying.TYPES[copy.part.dtype],
        stride=width,
        scaling=copy.scaling,
        transposed=copy.transposed,
    )
