"""Products of many rows of a variant with weights that are merged in registers; the base's rows in the same
launch.

One launch computes the same as a loop over merged models, without any merged weights in memory.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from workers.kernels import nvrtc
from workers.kernels.sparse_delta import merging, squares, tensor_cores
from workers.kernels.sparse_delta.row_tiles import NOBODY, NOTHING, ROWS

X_STAGES, W_STAGES = 4, 5  # squares of inputs and of weights that shared memory holds
STRIPS = 2  # of a block of threads
THREADS = 3 * 128
BOX_ROWS = 64  # of a copy of inputs
SIDE_BYTES = 2 * squares.SIDE
SHARED_BYTES = X_STAGES * ROWS * SIDE_BYTES + W_STAGES * STRIPS * (
    squares.SIDE * SIDE_BYTES + squares.square_bytes(4)
)


def fits(weight: torch.Tensor) -> bool:
    """Whether a weight's memory layout permits copies of boxes."""
    return _aligned(weight)


def apply(
    x: torch.Tensor,  # [M, K]
    out: torch.Tensor,  # [M, sum(slices)]
    bias: torch.Tensor | None,
    weights: merging.Layer,
    tiles: torch.Tensor,  # int32 [n, 3]
) -> None:
    """Compute out[rows of a tile] = x (base + D)^T + bias, with the delta D of the tile's slot.

    base + D is rounded like merged weights; for `BASE` there is no D. `tiles`: see `row_tiles`.
    """
    if x.device.type == "cpu":
        _in_torch(x, out, bias, weights, tiles)
        return
    inputs = x if _aligned(x) else x.contiguous()
    base, strips = weights.base, weights.base.shape[0] // squares.SIDE
    nvrtc.launch(
        compiled(x.dtype, x.device.index),
        (len(tiles), -(-strips // STRIPS)),
        THREADS,
        (
            *boxes(inputs.data_ptr(), *inputs.shape, inputs.stride(0), x.dtype, BOX_ROWS),
            *boxes(base.data_ptr(), *base.shape, base.stride(0), x.dtype, STRIPS * squares.SIDE),
            out.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            weights.arena.data_ptr(),
            weights.table.data_ptr(),
            tiles.data_ptr(),
            out.stride(0),
            *x.shape,
            weights.table.shape[1],
            strips,
            *tensor_cores.slices_argument(weights.slices),
        ),
    )


def _aligned(matrix: torch.Tensor) -> bool:
    return matrix.stride(1) == 1 and matrix.stride(0) % 8 == 0 and matrix.data_ptr() % 16 == 0


def _in_torch(
    x: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    weights: merging.Layer,
    tiles: torch.Tensor,
) -> None:
    for slot, first, count in tiles.tolist():
        if slot == NOBODY:
            out[first:] = 0
        elif slot != NOTHING:
            rows = slice(first, first + count)
            out[rows] = torch.nn.functional.linear(x[rows], weights.merged(slot), bias)


@functools.lru_cache(maxsize=4096)
def boxes(
    at: int, rows: int, columns: int, stride: int, dtype: torch.dtype, box_rows: int
) -> tuple[int, ...]:
    """Describe copies of boxes of `box_rows` rows and 64 columns of a matrix (CUtensorMap), as 16 numbers.

    Cached by address: making one takes longer than a launch.
    """
    from cuda.bindings import driver

    kinds = driver.CUtensorMapDataType
    kind = kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    if dtype == torch.float16:
        kind = kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
    made: Any = nvrtc.checked(
        driver.cuTensorMapEncodeTiled(
            kind,
            2,
            at,
            [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
            [driver.cuuint64_t(stride * dtype.itemsize)],
            [driver.cuuint32_t(squares.SIDE), driver.cuuint32_t(box_rows)],
            [driver.cuuint32_t(1)] * 2,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return tuple(int(word) for word in made.opaque)


def options(dtype: torch.dtype) -> tuple[str, ...]:
    """The compiler's options."""
    return tensor_cores.options(dtype, X_STAGES=X_STAGES, W_STAGES=W_STAGES)


@functools.cache
def compiled(dtype: torch.dtype, device: int) -> nvrtc.Kernel:
    """Load the kernel on `device`, which must be the current device; once."""
    return nvrtc.kernel(
        __package__,
        "merged_rows.cu",
        "merged_rows",
        tensor_cores.ARCHITECTURE,
        options(dtype),
        SHARED_BYTES,
        ("16Q", "16Q", *"PPPPPqiiii", tensor_cores.SLICES_FORMAT),
    )
