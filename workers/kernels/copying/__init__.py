"""Copies of matrices from a variant's files to the kernels' memory: cut, scaled, transposed and rounded.

One compiled call does all copies, and releases the GIL meanwhile. torch (`reference.py`) needs several calls
for each matrix, and an adapter has hundreds of small matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from workers.kernels.copying import machine_code
from workers.kernels.copying.machine_code import BF16, F16, F32

TYPES = {torch.float16: F16, torch.bfloat16: BF16, torch.float32: F32}

Memory = npt.NDArray[np.uint8]


class Copy(NamedTuple):
    """The copy of one part of a matrix.

    The part is rows [first_row, first_row + rows), and columns in the same way, of a matrix with `width`
    columns and `values` values. The matrix begins at byte `source` of the data that was read.
    The part goes to byte `into`, `stride` values from row to row; if `transposed`, columns of the matrix are
    rows there.
    `source_type` and `into_type` are of TYPES. Values are multiplied by `scaling` in float32 and then
    rounded.
    """

    source: int
    source_type: int
    values: int
    width: int
    first_row: int
    rows: int
    first_column: int
    columns: int
    into: int
    into_type: int
    stride: int
    scaling: float
    transposed: bool


def copy(copies: Sequence[Copy], source: Memory, into: Memory) -> tuple[int, int] | None:
    """Copy all of them; returns None, or the number of the first bad copy and the index of its bad value.

    A copy is bad if its matrix holds a NaN or an infinity. Raises ValueError, and copies nothing, if a copy
    would leave its matrix, `source` or `into`.

    Matrices and their copies begin at multiples of their values' size. `source` and `into` have a multiple of
    4 bytes, and begin at a multiple of 4.
    """
    if not copies:
        return None
    jobs = np.array(copies, dtype=machine_code.JOB).view(np.recarray)
    if len(outside := np.flatnonzero(_outside(jobs, len(source), len(into)))):
        raise ValueError(
            f"expected each copy within the {len(source)} bytes that were read and the {len(into)} bytes of"
            f" its target, got {copies[outside[0]]}"
        )
    most = max(each.columns * (1 + machine_code.BLOCK * each.transposed) for each in copies)
    floats = np.empty(most, np.float32)
    halves = source.view(np.uint16), source.view(np.uint32), into.view(np.uint16), into.view(np.uint32)
    own = floats, floats.view(np.uint32), floats.view(np.uint16)
    number, at = machine_code.copy(jobs, *halves, own)
    return None if number < 0 else (int(number), int(at))


def _outside(jobs: npt.NDArray[np.void], read: int, room: int) -> npt.NDArray[np.bool_]:
    """Which jobs would read or write outside their memory; the compiled code does not check this."""
    size, into_size = (np.where(jobs[each] == F32, 4, 2) for each in ("source_type", "into_type"))
    lines = np.where(jobs["transposed"], jobs["columns"], jobs["rows"])
    line = np.where(jobs["transposed"], jobs["rows"], jobs["columns"])
    last = (lines - 1) * jobs["stride"] + line
    wrong: npt.NDArray[np.bool_] = (jobs["first_row"] + jobs["rows"]) * jobs["width"] > jobs["values"]
    wrong |= jobs["first_column"] + jobs["columns"] > jobs["width"]
    wrong |= jobs["source"] + jobs["values"] * size > read
    wrong |= (jobs["into"] + last * into_size > room) | (line > jobs["stride"])
    for name in ("source", "first_row", "rows", "first_column", "columns", "into"):
        wrong |= jobs[name] < 0
    wrong |= (jobs["source"] % size > 0) | (jobs["into"] % into_size > 0)
    return wrong


def make_ready() -> None:
    """Compile the machine code, or read it from the cache, before it is needed."""
    memory = np.zeros(128, np.uint8)
    copy([Copy(0, F16, 1, 1, 0, 1, 0, 1, 0, BF16, 1, 1.0, transposed=False)], memory, np.zeros(128, np.uint8))
