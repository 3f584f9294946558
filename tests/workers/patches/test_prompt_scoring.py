"""Which head scores which row of a prompt, with runners that slice hidden states as vLLM's do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workers.kernels.rows import BASE
from workers.patches.vllm import prompt_scoring
from workers.patches.vllm.prompt_scoring import first_row
from workers.variants.batch import Batch

CPU = torch.device("cpu")
CHUNK = 3
ONE, TWO = (prompt_scoring.SCORERS[number].module for number in (0, 1))
UIDS = [7, 7, 0, 9, 9, 9, 9, 0]  # of each token row
SLOT_OF = {7: 1, 9: 0}


class First:
    """vLLM's first runner scores so: one request's range at a time."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def _get_prompt_logprobs_dict(
        self, hidden_states: torch.Tensor, stretches: list[tuple[int, int]]
    ) -> list[Any]:
        return [self.model.compute_logits(hidden_states[a:b]) for a, b in stretches]


class Second:
    """vLLM's second runner scores so: all token rows, some at a time."""

    def compute_prompt_logprobs(
        self, logits_fn: Callable[[torch.Tensor], Any], hidden_states: torch.Tensor
    ) -> list[Any]:
        return [logits_fn(hidden_states[a : a + CHUNK]) for a in range(0, len(hidden_states), CHUNK)]

    compute_prompt_token_id_logprobs = compute_prompt_logprobs


class Model:
    """Tells which slot each row that its head is run on belongs to."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def compute_logits(self, hidden_states: torch.Tensor) -> list[int]:
        return [int(slot) for slot in self._batch.head_rows.slots(len(hidden_states))]


@pytest.fixture
def batch() -> Batch:
    batch = Batch(16, 4, 2, CPU)
    batch.describe(UIDS, [7, 0, 9, 0], SLOT_OF, frozenset({"head"}))
    return batch


@pytest.fixture
def model(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> Model:
    """Followed, with classes of its own for vLLM's: a process keeps what was wrapped."""
    first, second = (type(made.__name__, (made,), dict(vars(made))) for made in (First, Second))
    monkeypatch.setitem(sys.modules, ONE, SimpleNamespace(GPUModelRunner=first))
    monkeypatch.setitem(sys.modules, TWO, SimpleNamespace(PromptLogprobsWorker=second))
    followed = Model(batch)
    prompt_scoring.follow(followed, batch)
    return followed


def runners() -> tuple[Any, Any]:
    return sys.modules[ONE].GPUModelRunner, sys.modules[TWO].PromptLogprobsWorker


EXPECTED = [SLOT_OF.get(uid, BASE) for uid in UIDS]


def test_a_requests_stretch_is_scored_by_its_own_head(model: Model) -> None:
    runner = runners()[0](model)
    hidden = torch.zeros(16, 5)[: len(UIDS)]
    found = runner._get_prompt_logprobs_dict(hidden_states=hidden, stretches=[(3, 7), (0, 2), (2, 3), (8, 8)])
    assert found == [EXPECTED[3:7], EXPECTED[0:2], EXPECTED[2:3], []]


def test_all_rows_are_scored_by_their_own_heads_chunk_by_chunk(model: Model) -> None:
    found = runners()[1]().compute_prompt_logprobs(model.compute_logits, torch.zeros(16, 5)[: len(UIDS)])
    assert [slot for chunk in found for slot in chunk] == EXPECTED


def test_sampled_rows_are_the_same_before_and_after(model: Model, batch: Batch) -> None:
    sampled = [SLOT_OF.get(uid, BASE) for uid in (7, 0, 9, 0)]
    assert model.compute_logits(torch.zeros(4, 5)) == sampled
    runners()[0](model)._get_prompt_logprobs_dict(torch.zeros(8, 5), [(0, 8)])
    assert model.compute_logits(torch.zeros(4, 5)) == sampled
    with pytest.raises(RuntimeError, match="rows of this step's"):
        runners()[1]().compute_prompt_logprobs(lambda x: model.compute_logits(x.clone()), torch.zeros(8, 5))
    assert batch.head_rows is batch.samples
    assert model.compute_logits(torch.zeros(4, 5)) == sampled


def test_a_process_wraps_vllms_runners_once(model: Model, batch: Batch) -> None:
    wrapped = runners()[0]._get_prompt_logprobs_dict
    prompt_scoring.follow(Model(batch), batch)
    assert runners()[0]._get_prompt_logprobs_dict is wrapped


@pytest.mark.parametrize("first", range(4))
def test_a_stretch_begins_where_it_was_cut(first: int) -> None:
    whole = torch.zeros(9, 6)[2:8, :4]  # with a stride that is not its width
    assert first_row(whole, whole[first : first + 2]) == first


@pytest.mark.parametrize(
    "part",
    [
        torch.zeros(2, 4),
        torch.zeros(6, 4, dtype=torch.float64),
        torch.zeros(12, 4)[::2],
    ],
)
def test_an_invalid_range_of_prompt_rows_is_refused(part: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="in an unknown way"):
        first_row(torch.zeros(6, 4), part)
