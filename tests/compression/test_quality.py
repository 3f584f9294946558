"""Losses between two models' outcomes, against the formulas written out."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.errors import TaskError
from profiler.evaluation.results import Metric
from profiler.evaluation.tasks import Task
from profiler.evaluation.types import (
    Distribution,
    Multiple,
    Pair,
    Question,
    Scored,
    Settings,
    TaskKind,
    Text,
)
from workers.compression.evaluated import Evaluation
from workers.compression.quality import (
    Outcome,
    described,
    loss_between,
    losses_between,
    outcomes_of,
    worst,
    write_quality,
)


def matched(before: Sequence[bool], after: Sequence[bool]) -> tuple[Outcome, Outcome]:
    def outcome(right: Sequence[bool]) -> Outcome:
        return Outcome("t", Metric.EXACT_MATCH, "d", tuple(map(float, right)))

    return outcome(before), outcome(after)


@given(items=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=200))
def test_a_share_s_loss_is_in_points(items: list[tuple[bool, bool]]) -> None:
    """The interval is Wald's for the difference of matched proportions, of a table with half an item more in
    each cell: its variance is that of a variable that is 1, -1 or 0."""
    before, after = zip(*items, strict=True)
    loss = loss_between(*matched(before, after))
    assert loss.value == pytest.approx(100 * (np.mean(before) - np.mean(after)))
    assert (loss.before, loss.after) == (np.mean(before), np.mean(after))
    lost = sum(a and not b for a, b in items) + 0.5
    won = sum(b and not a for a, b in items) + 0.5
    count = len(items) + 2
    mean = (lost - won) / count
    half = 1.959963984540054 * math.sqrt(((lost + won) / count - mean**2) / count)
    assert loss.low == pytest.approx(100 * max(mean - half, -1))
    assert loss.high == pytest.approx(100 * min(mean + half, 1))
    assert loss.unit == "points"


@given(data=st.data(), count=st.integers(2, 30))
def test_a_perplexity_s_loss_is_how_much_larger_it_became(data: st.DataObject, count: int) -> None:
    tokens = data.draw(st.lists(st.integers(1, 50), min_size=count, max_size=count))
    each = st.lists(st.floats(-5, -0.1), min_size=count, max_size=count)
    before, after = (np.array(data.draw(each)) * np.array(tokens) for _ in range(2))
    loss = loss_between(
        *(Outcome("t", Metric.PERPLEXITY, "d", tuple(v), tuple(tokens)) for v in (before, after))
    )
    old, new = (math.exp(-sum(v) / sum(tokens)) for v in (before, after))
    assert loss.before == pytest.approx(old)
    assert loss.after == pytest.approx(new)
    assert loss.value == pytest.approx(100 * (new - old) / old, abs=1e-9)
    assert loss.low <= loss.value + 1e-9
    assert loss.high >= loss.value - 1e-9
    assert loss.unit == "%"


def test_the_task_that_lost_most_counts() -> None:
    right, wrong = [True] * 10, [True] * 8 + [False] * 2
    losses = [loss_between(*matched(right, wrong)), loss_between(*matched(right, right))]
    assert worst(losses) is losses[0]
    assert losses[0].value == pytest.approx(20)
    assert str(losses[0]).startswith("t: 20.00 points (")


def test_outcomes_of_other_tasks_or_tokens_are_not_compared() -> None:
    first, second = matched([True], [True])
    other = Outcome("u", Metric.EXACT_MATCH, "e", (1.0,))
    with pytest.raises(ValueError, match="the same tasks"):
        losses_between([first], [other])
    assert len(losses_between([first], [second])) == 1
    texts = [Outcome("t", Metric.PERPLEXITY, "d", (-3.0,), (tokens,)) for tokens in (3, 4)]
    with pytest.raises(ValueError, match="other items or tokens"):
        loss_between(*texts)


@dataclass
class Known:
    """An answerer whose answers are given; each text's logarithm of probability is by its length."""

    answers: dict[str, str]
    tokens_per_letter: int = 1

    def generate(self, prompts: Sequence[str], settings: Settings) -> list[str]:
        return [self.answers[prompt] for prompt in prompts]

    def score(self, pairs: Sequence[Pair]) -> list[Scored]:
        texts = [pair.continuation for pair in pairs]
        return [Scored(-0.5 * len(text), len(text) * self.tokens_per_letter) for text in texts]

    def distributions(self, pairs: Sequence[Pair]) -> list[list[Distribution]]:
        raise AssertionError("no KL was asked for")


def test_outcomes_are_item_by_item() -> None:
    questions = Task("q", TaskKind.EXACT_MATCH, (Question("1+1=", ("2",)), Question("1+2=", ("3",))))
    choices = Task("c", TaskKind.MULTIPLE_CHOICE, (Multiple("a", ("long one", "short"), 1),))
    texts = Task("x", TaskKind.PERPLEXITY, (Text("abcd"), Text("ab")))
    found = outcomes_of([questions, choices, texts], Known({"1+1=": "2", "1+2=": "4"}))
    assert [each.values for each in found] == [(1.0, 0.0), (1.0,), (-2.0, -1.0)]
    assert [each.tokens for each in found] == [(), (), (4, 2)]
    assert [each.figure for each in found] == [0.5, 1.0, pytest.approx(math.exp(0.5))]
    assert [each.digest for each in found] == [questions.digest, choices.digest, texts.digest]


def test_two_tokenizers_are_named(tmp_path: Path) -> None:
    """Two tokenizers, of which one reads the same text as more tokens."""
    task = Task("prose", TaskKind.PERPLEXITY, (Text("abcd"),))

    def opened(folder: Path) -> Known:
        return Known({}, tokens_per_letter=1 if folder.name == "fine-tune" else 2)

    evaluation = Evaluation(tmp_path, tmp_path / "fine-tune", [task], tmp_path / "outcomes", "", opened)
    with pytest.raises(
        TaskError, match=r"prose: the two models scored other .*give base and fine-tune the same tokenizer"
    ):
        evaluation.losses((tmp_path / "fine-tune", "before"), (tmp_path / "delta", "after"))


def test_delta_json_gains_the_losses_and_keeps_its_fields(tmp_path: Path) -> None:
    (tmp_path / "delta.json").write_text(json.dumps({"format": "ostinato-delta", "version": 1}))
    losses = [loss_between(*matched([True] * 4, [True, False] * 2))]
    write_quality(tmp_path, losses)
    raw = json.loads((tmp_path / "delta.json").read_text())
    (entry,) = raw.pop("quality")
    assert raw == {"format": "ostinato-delta", "version": 1}
    assert (entry["task"], entry["metric"], entry["unit"]) == ("t", "exact_match", "points")
    assert (entry["before"], entry["after"], entry["value"], entry["items"]) == (1.0, 0.5, 50.0, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["delta.json"]


def test_an_interval_without_an_end_is_null_in_json() -> None:
    """One text does not show how texts differ."""
    loss = loss_between(*(Outcome("t", Metric.PERPLEXITY, "d", (-v,), (2,)) for v in (1.0, 2.0)))
    (entry,) = described([loss])
    assert entry["high"] is None
    assert "Infinity" not in json.dumps(entry)
