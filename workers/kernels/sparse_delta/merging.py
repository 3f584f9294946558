"""A layer's weights, as in one variant's merged model."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from workers.kernels import nvrtc
from workers.kernels.sparse_delta import reference, squares, tensor_cores


@dataclass(frozen=True)
class Layer:
    """A linear's base, and the deltas of all slots in squares.

    `base`: [sum(slices), K]; `table`: [slots, width(len(slices))].
    """

    base: torch.Tensor
    arena: torch.Tensor
    table: torch.Tensor
    slices: tuple[int, ...]

    def merged(self, slot: int) -> torch.Tensor:
        """base + D [sum(slices), K], on the host; `base` for a slot below 0."""
        if slot < 0:
            return self.base
        return reference.merged(self.base, self.arena, self.table[slot], self.slices)


def merge(into: torch.Tensor, layer: Layer, slot: int, first: int = 0) -> None:
    """Write base + D of the layer's outputs from `first` on to `into` [outputs, K].

    `first` and `outputs` are multiples of 64.
    """
    base, arena, fields = layer.base, layer.arena, layer.table[slot]
    if base.device.type == "cpu":
        into.copy_(layer.merged(slot)[first : first + len(into)])
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
            *tensor_cores.slices_argument(layer.slices),
        ),
    )


@functools.cache
def compiled(dtype: torch.dtype, device: int) -> nvrtc.Kernel:
    """Load the kernel on `device`, which must be the current device; once."""
    options, formats = tensor_cores.options(dtype), (*"PPPPqii", tensor_cores.SLICES_FORMAT)
    return nvrtc.kernel(__package__, "merge.cu", "merge", tensor_cores.ARCHITECTURE, options, 0, formats)
