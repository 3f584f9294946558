"""Other engines' kernels, called as those engines call them. None where they are not installed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from benchmarks.kernels.harness import Int32s

Factors = tuple[torch.Tensor, torch.Tensor]  # A [r, K] and B^T [r, N]


@functools.cache
def _vllm_ops():
    try:
        from vllm.lora.ops.triton_ops import LoRAKernelMeta, lora_expand, lora_shrink
    except ImportError as error:
        print(f"vLLM's LoRA kernels are not compared: {error}")
        return None
    return LoRAKernelMeta, lora_shrink, lora_expand


def vllm_lora(
    calls: Sequence[tuple[torch.Tensor, torch.Tensor]],
    weights: Sequence[Sequence[Sequence[Factors]]],
    slots: Int32s,
    slices: tuple[int, ...],
    max_rank: int,
) -> Callable[[int], None] | None:
    """vLLM's `add_lora_linear` (punica_wrapper/punica_gpu.py) on copy i of inputs and outputs.

    `weights[copy][slot][slice]`. As vLLM does, every adapter is padded to the largest rank.
    """
    ops = _vllm_ops()
    if ops is None:
        return None
    meta_type, shrink, expand = ops
    device = calls[0][0].device
    meta = meta_type.make(len(weights[0]), len(slots), device=device)
    meta.prepare_tensors(torch.from_numpy(slots).to(device))
    stacked = [
        [_stacked([adapter[index] for adapter in of_copy], max_rank) for index in range(len(slices))]
        for of_copy in weights
    ]

    def launch(copy: int) -> None:
        x, out = calls[copy]
        arguments = meta.meta_args(len(slots), False)
        shrunk = torch.empty((len(slices), len(slots), max_rank), dtype=torch.float32, device=device)
        shrink(x, [a for a, _ in stacked[copy]], shrunk, *arguments, 1.0)
        expand(shrunk, [b for _, b in stacked[copy]], out, *arguments, offset_start=0, add_inputs=True)

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
