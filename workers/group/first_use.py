"""Has no request wait while vLLM compiles what another one was the first to ask for.

vLLM compiles how it ranks tokens when a request first asks for log-probabilities, in the process that
computes everybody's steps: 2 s in each engine's life on a CPU, and 10 s where no cache has it.
"""

from __future__ import annotations

from typing import Any

import torch

DIFFERENT_ROWS = (1, 2)  # torch compiles one row apart from several


def count_not_less(scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: how many of `scores` [rows, vocabulary] are not less than their row's of `values` [rows,
    1].

    As vLLM's `batched_count_greater_than`; its temporary of a byte a score is what vLLM compiles it for, and
    little on a CPU.
    """
    counted: torch.Tensor = (scores >= values).sum(-1)
    return counted


def rank_tokens_uncompiled() -> None:
    """Called in every process of a rank on a CPU. May run twice."""
    from vllm.v1.sample import sampler

    sampler.batched_count_greater_than = count_not_less


def compile_token_ranking(runner: Any) -> None:
    """Have vLLM's runner (`GPUModelRunner`) on a GPU compile it now. The newer one has kernels of its own."""
    gather = getattr(getattr(runner, "sampler", None), "gather_logprobs", None)
    if gather is None:
        return
    vocabulary = runner.model_config.get_vocab_size()
    for rows in DIFFERENT_ROWS:
        scores = torch.zeros(rows, vocabulary, dtype=torch.float32, device=runner.device)
        gather(scores, 1, torch.zeros(rows, dtype=torch.int64, device=runner.device))
