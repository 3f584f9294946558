"""Compiles at the start what vLLM otherwise compiles at the first request that needs it.

vLLM compiles its ranking of tokens when a request first asks for log-probabilities, in the process that
computes the steps of all requests. That takes 2 s once in each engine's life on a CPU, and 10 s without a
cache.
"""

from __future__ import annotations

from typing import Any

import torch

DIFFERENT_ROWS = (1, 2)  # torch compiles one row separately from several


def count_not_less(scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: how many of `scores` [rows, vocabulary] are at least their row's value in `values` [rows,
    1].

    The same as vLLM's `batched_count_greater_than`. vLLM compiles it to avoid a temporary of one byte per
    score, which is small on a CPU.
    """
    counted: torch.Tensor = (scores >= values).sum(-1)
    return counted


def rank_tokens_uncompiled() -> None:
    """Replace the compiled function in a rank's process on a CPU. May run twice."""
    from vllm.v1.sample import sampler

    sampler.batched_count_greater_than = count_not_less


def compile_token_ranking(runner: Any) -> None:
    """Make vLLM's runner (`GPUModelRunner`) on a GPU compile it now. The newer runner has its own kernels."""
    gather = getattr(getattr(runner, "sampler", None), "gather_logprobs", None)
    if gather is None:
        return
    vocabulary = runner.model_config.get_vocab_size()
    for rows in DIFFERENT_ROWS:
        scores = torch.zeros(rows, vocabulary, dtype=torch.float32, device=runner.device)
        gather(scores, 1, torch.zeros(rows, dtype=torch.int64, device=runner.device))
