"""The ranking of tokens for log-probabilities, without a compilation at the first request on a CPU.

vLLM compiles it in the process that computes the steps of all requests, for 2 s, or 10 s without a cache.
It does so to avoid a temporary of one byte per score, which is small on a CPU.
"""

from __future__ import annotations

import torch

from profiler.patches.target import Target

COUNT = Target(
    "vllm.v1.sample.sampler",
    "batched_count_greater_than",
    parameters=("x", "values"),
    read={"0.26": "28068caa1a37", "0.32": "28068caa1a37"},
)


def install() -> None:
    """Replace the compiled function in a rank's process on a CPU."""
    COUNT.replace_once(lambda _: count_not_less)


def count_not_less(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: how many scores of `x` [rows, vocabulary] are at least their row's value in `values`
    [rows, 1]; the same as vLLM's function.
    """
    counted: torch.Tensor = (x >= values).sum(-1)
    return counted
