"""Prompts are scored some rows at a time, with the scores that vLLM computes for all rows at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from profiler.roofline import LOGITS_ROWS
from workers.patches.vllm import prompt_rows, token_ranking
from workers.patches.vllm.prompt_rows import rows_at_once

token_ranking.install()

VOCABULARY, WIDTH, TOKENS, SEQUENCES = 50, 6, 150, 20
FLOAT32_BYTES = 4


class Head:
    """A model's head, which remembers how many rows it was asked for at once."""

    def __init__(self) -> None:
        self.weight = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(1))
        self.asked: list[int] = []

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.asked.append(len(hidden_states))
        return hidden_states @ self.weight.T


def runner_of(head: Head, prompt: list[int], count: int) -> Any:
    """vLLM's older runner, in the step that computes all of a prompt."""
    runner = object.__new__(GPUModelRunner)
    runner.__dict__ |= {
        "model": head,
        "sampler": Sampler(),
        "device": torch.device("cpu"),
        "scheduler_config": SimpleNamespace(max_num_seqs=SEQUENCES),
        "model_config": SimpleNamespace(logprobs_mode="raw_logprobs"),
        "num_prompt_logprobs": {"r": count},
        "requests": {
            "r": SimpleNamespace(
                prompt_token_ids=prompt, num_computed_tokens=0, in_progress_prompt_logprobs_cpu=None
            )
        },
        "input_batch": SimpleNamespace(req_id_to_index={"r": 0}),
        "query_start_loc": SimpleNamespace(np=torch.tensor([0, len(prompt)]).numpy()),
        "_sync_device": lambda: None,
    }
    return runner


@pytest.mark.parametrize("count", [0, 3])
def test_scores_are_the_same_in_parts(count: int) -> None:
    prompt = [(7 * i) % VOCABULARY for i in range(TOKENS)]
    hidden = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(2))
    whole, parts = Head(), Head()
    expected = runner_of(whole, prompt, count)._get_prompt_logprobs_dict(hidden, {"r": TOKENS})["r"]
    bounded = runner_of(parts, prompt, count)
    prompt_rows.bound(bounded)
    found = bounded._get_prompt_logprobs_dict(hidden, {"r": TOKENS})["r"]
    assert whole.asked == [TOKENS - 1]
    assert sum(parts.asked) == TOKENS - 1
    assert max(parts.asked) <= rows_at_once(SEQUENCES)
    assert torch.equal(found.logprob_token_ids, expected.logprob_token_ids)
    assert torch.equal(found.selected_token_ranks, expected.selected_token_ranks)
    assert torch.allclose(found.logprobs, expected.logprobs, atol=1e-5)
    assert bounded.model is parts


def test_the_newer_runner_scores_in_parts_too() -> None:
    asked: list[int] = []

    def inner(ids: torch.Tensor, hidden: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
        asked.append(len(ids))
        return ids[:, None], hidden, ids + 1

    ids, hidden = torch.arange(TOKENS), torch.randn(TOKENS, WIDTH)
    found = prompt_rows._in_parts(inner, 64)(ids, hidden, None, 1)
    assert asked == [64, 64, 22]
    for part, whole in zip(found, inner(ids, hidden), strict=True):
        assert torch.equal(part, whole)


@pytest.mark.parametrize("sequences", [1, 16, 64, 256, 1024])
def test_the_rows_fit_into_the_plan(sequences: int) -> None:
    """Logits and their logarithms, in float32, in a plan's memory for logits."""
    planned_bytes = LOGITS_ROWS * VOCABULARY * FLOAT32_BYTES
    assert 2 * rows_at_once(sequences) * VOCABULARY * FLOAT32_BYTES <= planned_bytes
    assert rows_at_once(sequences) <= max(prompt_rows.MIN_ROWS, sequences)
