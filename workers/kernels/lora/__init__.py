"""LoRA adapters of many variants in one batch: y += (x A^T) B^T on each variant's rows."""

from __future__ import annotations

from workers.kernels.lora import reference
from workers.kernels.lora.plan import Plan, Scratch, plan
from workers.kernels.low_rank import Operation

__all__ = ["Scratch", "apply", "expand", "shrink"]

_OPERATION: Operation[Plan, Scratch] = Operation(
    __name__,
    reference.apply,
    lambda tiles, x, scratch: plan(tiles.block, x.shape[1], scratch.max_rank),
)
apply, shrink, expand = _OPERATION.apply, _OPERATION.shrink, _OPERATION.expand
