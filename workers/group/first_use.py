"""Compiles at the start what vLLM otherwise compiles at the first request that needs it.

vLLM compiles its ranking of tokens when a request first asks for log-probabilities, in the process that
computes the steps of all requests. (On a CPU our function needs no compilation:
`workers.patches.vllm.token_ranking`.)
"""

from __future__ import annotations

from typing import Any

import torch

DIFFERENT_ROWS = (1, 2)  # torch compiles one row separately from several


def compile_token_ranking(runner: Any) -> None:
    """Make vLLM's runner (`GPUModelRunner`) on a GPU compile it now. The newer runner has its own kernels."""
    gather = getattr(getattr(runner, "sampler", None), "gather_logprobs", None)
    if gather is None:
        return
    vocabulary = runner.model_config.get_vocab_size()
    for rows in DIFFERENT_ROWS:
        scores = torch.zeros(rows, vocabulary, dtype=torch.float32, device=runner.device)
        gather(scores, 1, torch.zeros(rows, dtype=torch.int64, device=runner.device))
