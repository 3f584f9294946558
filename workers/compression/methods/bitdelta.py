"""BitDelta (Liu et al. 2024): one bit per weight of the difference, and one scale per matrix."""

from __future__ import annotations

import torch

from workers.compression.types import Compressed, Method, Problem


def bitdelta() -> Method:
    """W_base + a sign(d) with a = mean|d|, the scale with the least |d - a sign(d)|_F.

    The paper's second step is not done: it trains the scales of all matrices together against the fine-tune's
    logits. The size is one bit per weight and one float16 scale; a difference of 0 counts as positive.
    """
    return Method("bitdelta: signs and one scale, not distilled", None, calibrated=False, step=_step)


def _step(problem: Problem) -> Compressed:
    delta = problem.delta
    scale = delta.abs().mean().half().float()
    if not bool(scale.isfinite()):
        raise ValueError(
            "expected finite differences, got NaN, infinity or too large values; check both checkpoints"
        )
    signs = torch.where(delta < 0, -1.0, 1.0)
    return Compressed(problem.base + scale * signs, -(-delta.numel() // 8) + 2)
