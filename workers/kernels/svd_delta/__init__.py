"""Singular-value deltas of many variants in one batch: y += (x V^T) U^T on each variant's rows."""

from __future__ import annotations

import torch

from workers.kernels.low_rank import Operation
from workers.kernels.rows import SMALL_BLOCK, Tiles, batch_invariant
from workers.kernels.svd_delta import reference, tensor_cores, tensor_cores_check
from workers.kernels.svd_delta.plan import MAX_SLICES, Plan, Scratch, admit, plan
from workers.kernels.svd_delta.tensor_cores import Cut

__all__ = ["Scratch", "admit", "apply", "expand", "plan_for", "shrink"]


def plan_for(tiles: Tiles, x: torch.Tensor, scratch: Scratch) -> Plan | Cut:
    """Choose CUDA for few rows if this process may use it, else Triton.

    In vLLM's batch-invariant mode a row's result may not depend on the other rows, so CUDA serves all batches
    that are decoded.
    """
    few = tiles.num_rows <= tensor_cores.MOST_ROWS or batch_invariant()
    few = few and x.device.type == "cuda" and tiles.block == SMALL_BLOCK
    if few and x.dtype in tensor_cores.DTYPES and tensor_cores_check.chosen(x.dtype):
        return tensor_cores.cut_for(tiles.num_rows, scratch.slice_places)
    return plan(tiles.block)


def _module(cut: Plan | Cut) -> str:
    return "tensor_cores" if isinstance(cut, Cut) else "kernel"


_OPERATION: Operation[Plan | Cut, Scratch] = Operation(
    __name__,
    reference.apply,
    plan_for,
    max_slices=MAX_SLICES,
    kernel_for=_module,
)
apply, shrink, expand = _OPERATION.apply, _OPERATION.shrink, _OPERATION.expand
