"""Scores prompts some rows at a time, so that the scores of a prompt fit into the planned memory.

For the log-probabilities of a prompt, vLLM computes the logits of all its tokens in a step, and their
logarithms: [tokens, vocabulary] in float32, 2.5 GB for 2,048 tokens and 152,000 words. The newer runner of
vLLM takes 1,024 rows at a time. A plan has memory for the logits of LOGITS_ROWS sequences
(`profiler.roofline`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch

from profiler.patches.target import Target
from profiler.roofline import LOGITS_ROWS

MIN_ROWS = 16  # fewer rows would read the head's weights too often
MAX_ROWS = LOGITS_ROWS // 2  # logits and logarithms exist at the same time

# The older runner, on CPUs and for some models of vLLM 0.26.
SCORER = Target(
    "vllm.v1.worker.gpu_model_runner",
    "GPUModelRunner._get_prompt_logprobs_dict",
    ("hidden_states", "num_scheduled_tokens"),
    read={"0.26": "294072065317", "0.32": "cb90d4f1064a"},
)
# The newer runner.
CHUNKS = Target(
    "vllm.v1.worker.gpu.sample.prompt_logprob",
    "compute_prompt_logprobs_with_chunking",
    ("prompt_token_ids", "prompt_hidden_states", "logits_fn", "num_prompt_logprobs"),
    read={"0.26": "f3cf09923a07", "0.32": "b2fe8c4fa910"},
)


def rows_at_once(sequences: int) -> int:
    """The rows of a prompt that are scored at once, for an engine that runs `sequences` requests at once: its
    measured memory includes the logits of all of them."""
    return min(MAX_ROWS, max(MIN_ROWS, sequences))


def bound(runner: Any) -> None:
    """Make this runner, whose model is loaded, score prompts by `rows_at_once`."""
    rows = rows_at_once(runner.scheduler_config.max_num_seqs)
    if hasattr(runner, "_get_prompt_logprobs_dict"):
        SCORER.replace(lambda inner: _scoring(runner, inner, rows), runner)
    if CHUNKS.module in sys.modules:
        CHUNKS.replace_once(lambda inner: _in_parts(inner, rows))


class _Later(NamedTuple):
    """Hidden states whose logits are computed when they are needed."""

    hidden: torch.Tensor


class _Model:
    """The model, whose logits come later."""

    def compute_logits(self, hidden_states: torch.Tensor) -> _Later:
        return _Later(hidden_states)


class _Sampler:
    """The sampler, for logits that come later."""

    def __init__(self, model: Any, sampler: Any, rows: int) -> None:
        self._model, self._sampler, self._rows = model, sampler, rows

    def compute_logprobs(self, logits: _Later) -> _Later:
        return logits

    def gather_logprobs(self, scores: _Later, count: int, token_ids: torch.Tensor) -> tuple[Any, ...]:
        parts = []
        for hidden, ids in zip(scores.hidden.split(self._rows), token_ids.split(self._rows), strict=True):
            logits = self._sampler.compute_logprobs(self._model.compute_logits(hidden))
            parts.append(self._sampler.gather_logprobs(logits, count, ids))
        return _joined(parts)


def _scoring(runner: Any, inner: Callable[..., Any], rows: int) -> Callable[..., Any]:
    @wraps(inner)
    def scores(*args: Any, **kwargs: Any) -> Any:
        model, sampler = runner.model, runner.sampler
        runner.model, runner.sampler = _Model(), _Sampler(model, sampler, rows)
        try:
            return inner(*args, **kwargs)
        finally:
            runner.model, runner.sampler = model, sampler

    return scores


def _in_parts(inner: Callable[..., Any], rows: int) -> Callable[..., Any]:
    @wraps(inner)
    def computed(
        prompt_token_ids: torch.Tensor, prompt_hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        ids, hidden = prompt_token_ids.split(rows), prompt_hidden_states.split(rows)
        return _joined([inner(*part, *args, **kwargs) for part in zip(ids, hidden, strict=True)])

    return computed


def _joined(parts: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Token ids, scores and ranks of all parts; other fields are empty for prompts."""
    return tuple(torch.cat([part[field] for part in parts]) for field in range(3))
