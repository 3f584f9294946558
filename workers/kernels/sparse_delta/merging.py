"""A product with one variant's merged weights, for rows of a prefill.

The product is then the base's own, as fast as a merged model's. Merging costs the same for any number of
rows, so it pays from `MERGED_FROM` on. Large weights are merged in parts, to bound the memory that takes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from workers.kernels import nvrtc
from workers.kernels.sparse_delta import reference, squares, tensor_cores

SCRATCH_BYTES = 96 << 20
MERGED_FROM = 448  # rows of one variant, from which on merging is the faster way on an H200
# The same where a step could run from a graph. Without one the host launches each kernel, which took some
# 60 ms for the 128 linears of a 7B model on an H200, and the GPU would wait. Beside BUSY requests or more it
# is still busy with the step before, and waits for less long (measured: docs/benchmarks-details.md).
UNGRAPHED_FROM = 1600
UNGRAPHED_FROM_BUSY = 800
BUSY = 9
MEASURED_BYTES = 101_187_584  # of such a linear's weight, on average


def ungraphed_from(requests: int, weight_bytes: float) -> int:
    """Rows of one variant from which on a step of so many requests merges instead of running from a graph.

    `weight_bytes`: of a linear on this rank, on average. The host's time is the same for small ones, so more
    rows must gain it.
    """
    rows = UNGRAPHED_FROM_BUSY if requests >= BUSY else UNGRAPHED_FROM
    return max(MERGED_FROM, round(rows * MEASURED_BYTES / weight_bytes))


class Scratch:
    """Memory for merged weights; one layer uses it at a time."""

    def __init__(self, device: torch.device, size: int = SCRATCH_BYTES) -> None:
        self.size = size
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._made: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def weights(self, outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
        """[outputs, inputs], at the memory's start."""
        key = outputs, inputs, dtype
        if (made := self._made.get(key)) is None:
            used = self._memory[: outputs * inputs * dtype.itemsize]
            made = self._made[key] = used.view(dtype).view(outputs, inputs)
        return made


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
    scratch: Scratch,
) -> None:
    """out = x (base + D)^T + bias."""
    outputs, inputs = weights.base.shape
    for part in _parts(outputs, x.dtype.itemsize * inputs, scratch.size):
        merged = scratch.weights(part.stop - part.start, inputs, x.dtype)
        merge(merged, weights, part.start)
        into = out if merged.shape[0] == outputs else out[:, part]
        linear(x, merged, None if bias is None else bias[part], into)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """out [M, outputs] = x [M, K] weight^T + bias, written where it shall lie."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _parts(outputs: int, row_bytes: int, room: int) -> Iterator[slice]:
    """Outputs whose weights fit into `room` bytes at a time, in as few parts of about one size as can be."""
    parts = -(-outputs * row_bytes // room)
    at_once = -(-outputs // (parts * squares.SIDE)) * squares.SIDE
    if at_once * row_bytes > room:  # parts of whole strips are a little larger
        at_once -= squares.SIDE
    return (slice(first, min(first + at_once, outputs)) for first in range(0, outputs, at_once))


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
        (-(-inputs // (squares.SIDE * tensor_cores.WARPS)), into.shape[0] // squares.SIDE),
        32 * tensor_cores.WARPS,
        (
            into.data_ptr(),
            base.data_ptr(),
            arena.data_ptr(),
            fields.data_ptr(),
            base.stride(0),
            inputs,
            first // squares.SIDE,
            *tensor_cores.slices_argument(weights.slices),
        ),
    )


@functools.cache
def compiled(dtype: torch.dtype, device: int) -> nvrtc.Kernel:
    """Loaded on `device`, the current one; once."""
    options, formats = tensor_cores.options(dtype), (*"PPPPqii", tensor_cores.SLICES_FORMAT)
    return nvrtc.kernel(__package__, "merge.cu", "merge", tensor_cores.ARCHITECTURE, options, 0, formats)
