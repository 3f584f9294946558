"""Log-probabilities: the first request for them makes no other request wait for a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.group import first_use
from workers.patches.vllm.token_ranking import count_not_less

ON_A_CPU = """
import torch
import workers.group.cpu
from torch._dynamo.utils import counters
from vllm.v1.sample.sampler import Sampler

scores = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.1, 0.4]]).log()
found = Sampler.gather_logprobs(scores, 1, torch.tensor([2, 0]))
print(found.selected_token_ranks.tolist(), dict(counters["stats"]))
"""


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=4), st.integers(0, 4)
)
def test_tokens_are_ranked_as_sorting_ranks_them(rows: list[list[int]], token: int) -> None:
    """The last place among equal values."""
    scores = torch.tensor(rows, dtype=torch.float32)
    places = [len([score for score in row if score >= row[token]]) for row in rows]
    assert count_not_less(scores, scores[:, token : token + 1]).tolist() == places


def test_a_rank_on_a_cpu_compiles_nothing_for_log_probabilities() -> None:
    found = subprocess.run(
        [sys.executable, "-c", ON_A_CPU],
        env={**os.environ, "TORCH_COMPILE_DISABLE": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.splitlines()[-1] == "[2, 1] {}"


def test_a_rank_on_a_gpu_asks_for_one_row_and_for_several() -> None:
    asked: list[tuple[Any, ...]] = []

    def gather(scores: torch.Tensor, most: int, tokens: torch.Tensor) -> None:
        asked.append((tuple(scores.shape), scores.dtype, most, tuple(tokens.shape), tokens.dtype))

    runner = SimpleNamespace(
        sampler=SimpleNamespace(gather_logprobs=gather),
        model_config=SimpleNamespace(get_vocab_size=lambda: 7),
        device=torch.device("cpu"),
    )
    first_use.compile_token_ranking(runner)
    assert asked == [((rows, 7), torch.float32, 1, (rows,), torch.int64) for rows in (1, 2)]


def test_a_runner_that_ranks_otherwise_is_left_alone() -> None:
    first_use.compile_token_ranking(SimpleNamespace(sampler=SimpleNamespace()))
    first_use.compile_token_ranking(SimpleNamespace())
