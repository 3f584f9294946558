"""Other engines' kernels, called as those engines call them. None where they are not installed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.kernels.harness import Int32s
from benchmarks.kernels.linears import Layer

Factors = tuple[torch.Tensor, torch.Tensor]  # A [r, K] and B^T [r, N]


@functools.cache
def _vllm_ops() -> tuple[Any, Any, Any, Any] | None:
    try:
        from vllm.lora.ops.triton_ops import LoRAKernelMeta, lora_expand, lora_shrink, utils
    except Exception as error:  # whatever is amiss with that installation
        print(f"vLLM's LoRA kernels are not compared: {error!r}")
        return None
    return LoRAKernelMeta, lora_shrink, lora_expand, utils


def vllm_lora(
    layers: Sequence[Layer[Any]], slots: Int32s, slices: tuple[int, ...], max_rank: int
) -> Callable[[Layer[Any]], None] | None:
    """vLLM's `add_lora_linear` (punica_wrapper/punica_gpu.py) on a layer whose `weights[slot][slice]` are A
    and B^T. As vLLM does, every adapter is padded to the largest rank.
    """
    ops = _vllm_ops() if layers[0].x.is_cuda else None
    if ops is None:
        return None
    meta_type, shrink, expand, utils = ops
    for known in (utils._LORA_A_PTR_DICT, utils._LORA_B_PTR_DICT):
        known.clear()  # by address: that of another case's weights may be ours by now
    device = layers[0].x.device
    meta = meta_type.make(len(layers[0].weights), len(slots), device=device)
    meta.prepare_tensors(torch.from_numpy(slots).to(device))
    stacked = {
        id(layer): [_stacked([adapter[i] for adapter in layer.weights], max_rank) for i in range(len(slices))]
        for layer in layers
    }

    def launch(layer: Layer[Any]) -> None:
        arguments = meta.meta_args(len(slots), False)
        shrunk = torch.empty((len(slices), len(slots), max_rank), dtype=torch.float32, device=device)
        weights = stacked[id(layer)]
        shrink(layer.x, [a for a, _ in weights], shrunk, *arguments, 1.0)
        expand(shrunk, [b for _, b in weights], layer.out, *arguments, offset_start=0, add_inputs=True)

    return launch


def _stacked(factors: Sequence[Factors], max_rank: int) -> Factors:
    """A [adapters, 1, max_rank, K] and B [adapters, 1, N, max_rank]."""
    a, b = factors[0]
    stacked_a = a.new_zeros(len(factors), 1, max_rank, a.shape[1])
    stacked_b = b.new_zeros(len(factors), 1, b.shape[1], max_rank)
    for index, (one_a, one_b) in enumerate(factors):
        stacked_a[index, 0, : len(one_a)] = one_a
        stacked_b[index, 0, :, : len(one_b)] = one_b.T
    return stacked_a, stacked_b
