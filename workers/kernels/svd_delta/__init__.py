"""Singular-value deltas of many variants in one batch: y += (x V^T) U^T on each variant's rows."""

from __future__ import annotations

from workers.kernels.low_rank import Operation
from workers.kernels.svd_delta import reference
from workers.kernels.svd_delta.plan import MAX_SLICES, Plan, Scratch, admit, plan

__all__ = ["Scratch", "admit", "apply", "expand", "shrink"]

_OPERATION: Operation[Plan, Scratch] = Operation(
    __name__,
    reference.apply,
    lambda tiles, x, scratch: plan(tiles.block),
    max_slices=MAX_SLICES,
)
apply, shrink, expand = _OPERATION.apply, _OPERATION.shrink, _OPERATION.expand
