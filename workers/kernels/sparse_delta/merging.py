"""A product with one variant's merged weights, for rows of a prefill.

The product is then the base's own, as fast as a merged model's. Merging costs the same for any number of
rows, so it pays from `MERGED_FROM` on. Large weights are merged in parts, to bound the memory that takes.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

from workers.kernels import nvrtc
from workers.kernels.sparse_delta import reference, squares, tensor_cores

SCRATCH_BYTES = 96 << 20
MERGED_FROM = 384  # rows of one variant, from which on merging is the faster way on an H100


def scratch(device: torch.device) -> torch.Tensor:
    """Memory for merged weights; one layer uses it at a time."""
    return torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class Weights:
    """A layer's base, and the delta of one variant in squares.

    `base`: [sum(slices), K]; `fields`: the variant's row of the layer's table, [width(len(slices))].
    """

    base: torch.Tensor
    arena: torch.Tensor
    fields: torch.Tensor
    slices: tuple[int, ...]


def product(
    x: torch.Tensor,  # [M, K]
    out: torch.Tensor,  # [M, sum(slices)]
    bias: torch.Tensor | None,
    weights: Weights,
    scratch: torch.Tensor,
) -> None:
    """out = x (base + D)^T + bias."""
    outputs, row_bytes = len(weights.base), x.dtype.itemsize * x.shape[1]
    parts = -(-outputs * row_bytes // len(scratch))
    at_once = -(-outputs // (parts * squares.SIDE)) * squares.SIDE
    if at_once * row_bytes > len(scratch):  # parts of whole strips are a little larger
        at_once -= squares.SIDE
    for first in range(0, outputs, at_once):
        here = slice(first, min(first + at_once, outputs))
        count = here.stop - here.start
        merged = scratch[: count * row_bytes].view(x.dtype).view(count, x.shape[1])
        merge(merged, weights, first)
        if bias is None:
            torch.mm(x, merged.t(), out=out[:, here])
        else:
            torch.addmm(bias[here], x, merged.t(), out=out[:, here])


def merge(into: torch.Tensor, weights: Weights, first: int) -> None:
    """into [outputs, K] = base + D, of the layer's outputs from `first` on; both multiples of 64."""
    base, arena, fields = weights.base, weights.arena, weights.fields
    if base.device.type == "cpu":
        merged = reference.merged(base, arena, fields, weights.slices)
        into.copy_(merged[first : first + len(into)])
        return
    inputs = base.shape[1]
    nvrtc.launch(
        compiled(base.dtype, base.device.index),
        (-(-inputs // (squares.SIDE * tensor_cores.WARPS)), len(into) // squares.SIDE),
        32 * tensor_cores.WARPS,
        [
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (into, base, arena, fields)),
            ctypes.c_int64(base.stride(0)),
            ctypes.c_int(inputs),
            ctypes.c_int(first // squares.SIDE),
            tensor_cores.slices_argument(weights.slices),
        ],
    )


@functools.cache
def compiled(dtype: torch.dtype, device: int) -> nvrtc.Kernel:
    """Loaded on `device`, the current one; once."""
    options = tensor_cores.options(dtype)
    return nvrtc.kernel(__package__, "merge.cu", "merge", tensor_cores.ARCHITECTURE, options, 0)
