"""Scores and intervals against closed forms, numpy, scipy and a model whose answers are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from profiler.evaluation.evaluate import compare, divergence_result, evaluate, rights
from profiler.evaluation.normalising import Normalise
from profiler.evaluation.results import Metric, mean_per_token, perplexity, proportion
from profiler.evaluation.scoring import chosen, divergence, is_right
from profiler.evaluation.tasks import Task
from profiler.evaluation.types import (
    Distribution,
    Form,
    Likelihood,
    Multiple,
    Pair,
    Question,
    Scored,
    Settings,
    TaskKind,
    Text,
)


@dataclass
class Known:
    """Answers from tables. `expectations` gives each scored position's distribution by text."""

    answers: dict[str, str] = field(default_factory=dict)
    scores: dict[tuple[str, str], Scored] = field(default_factory=dict)
    expectations: dict[str, list[Distribution]] = field(default_factory=dict)

    def generate(self, prompts: Sequence[str], settings: Settings) -> list[str]:
        return [self.answers[prompt] for prompt in prompts]

    def score(self, pairs: Sequence[Pair]) -> list[Scored]:
        return [self.scores[pair.context, pair.continuation] for pair in pairs]

    def distributions(self, pairs: Sequence[Pair]) -> list[list[Distribution]]:
        return [self.expectations[pair.continuation] for pair in pairs]


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_a_shares_interval_is_wilsons(counts: tuple[int, int]) -> None:
    right, count = counts
    expected = binomtest(right, count).proportion_ci(0.95, "wilson")
    found = proportion(right, count)
    assert found.value == right / count
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize(("right", "count"), [(0, 0), (3, 2), (-1, 2)])
def test_a_share_of_nothing_has_no_interval(right: int, count: int) -> None:
    with pytest.raises(ValueError, match="count of at least 1"):
        proportion(right, count)


def test_texts_of_equal_length_have_the_mean_and_its_standard_error() -> None:
    sums = np.array([3.0, 5.0, 4.0, 8.0])
    found = mean_per_token(list(sums), [2, 2, 2, 2])
    means = sums / 2
    half = 1.959964 * means.std(ddof=1) / 2
    assert (found.value, found.low, found.high) == pytest.approx(
        (means.mean(), means.mean() - half, means.mean() + half), abs=1e-6
    )


def test_the_interval_of_a_ratio_covers_it_95_times_in_100() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        tokens = rng.integers(5, 200, 60)
        own = rng.gamma(4, 0.5, 60)  # a text's own surprise, 2 in the mean
        sums = tokens * own
        found = mean_per_token(list(sums), tokens.tolist())
        held += found.low <= 2 <= found.high
    assert 0.91 < held / 2000 < 0.97


def test_perplexity_is_e_to_the_mean_surprise() -> None:
    found = perplexity([-2 * math.log(8), -6 * math.log(8)], [2, 6])
    assert (found.value, found.low, found.high) == pytest.approx((8, 8, 8))
    alone = perplexity([-1.0], [1])
    assert alone.value == pytest.approx(math.e)
    assert (alone.low, alone.high) == (0, math.inf)
    with pytest.raises(ValueError, match="at least one token"):
        perplexity([0.0], [0])


def test_an_answer_is_right_if_it_is_one_of_them() -> None:
    question = Question("?", ("Aunt", "great-aunt"))
    settings = Settings(normalise=Normalise.LAST_WORD)
    assert is_right(question, "She is his aunt.", settings)
    assert is_right(question, "his GREAT-AUNT", settings)
    assert not is_right(question, "aunt Mary", settings)


def test_a_choice_is_by_its_likelihood_whole_or_per_byte() -> None:
    item = Multiple("?", (" no", " certainly", "\u00e9\u00e9\u00e9"), 1)
    scores = [Scored(-3.0, 1), Scored(-5.0, 2), Scored(-6.0, 3)]
    assert chosen(item, scores, Likelihood.TOTAL) == 0  # -3 is the most
    assert chosen(item, scores, Likelihood.PER_BYTE) == 1  # of -1, -0.5 and -1
    assert chosen(item, [Scored(-1.0, 1)] * 3, Likelihood.TOTAL) == 0


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return np.asarray(logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max())


@given(st.integers(0, 10_000), st.integers(1, 30), st.integers(1, 30))
def test_a_divergence_from_some_tokens_bounds_the_whole_one(seed: int, ours: int, theirs: int) -> None:
    rng = np.random.default_rng(seed)
    p, q = log_softmax(rng.normal(0, 2, 30)), log_softmax(rng.normal(0, 2, 30))
    whole = float((np.exp(p) * (p - q)).sum())
    top_p, top_q = np.argsort(-p)[:ours], np.argsort(-q)[:theirs]
    found = divergence(
        Distribution({int(i): float(p[i]) for i in top_p}), Distribution({int(i): float(q[i]) for i in top_q})
    )
    shared = np.intersect1d(top_p, top_q)
    assert 0 <= found.nats <= whole + 1e-9
    assert found.coverage == pytest.approx(np.exp(p[shared]).sum())
    # The merged distributions' own KL, by numpy.
    merged_p = np.append(np.exp(p[shared]), 1 - np.exp(p[shared]).sum())
    merged_q = np.append(np.exp(q[shared]), 1 - np.exp(q[shared]).sum())
    seen = merged_p > 1e-5
    assert found.nats == pytest.approx(
        (merged_p[seen] * np.log(merged_p[seen] / merged_q[seen])).sum(), abs=1e-4
    )


def test_a_divergence_from_all_tokens_is_the_whole_one() -> None:
    p = Distribution({0: math.log(0.75), 1: math.log(0.25)})
    q = Distribution({0: math.log(0.5), 1: math.log(0.5)})
    found = divergence(p, q)
    assert found.nats == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert found.coverage == pytest.approx(1)
    assert divergence(p, p).nats == 0


def test_an_exact_match_counts_right_answers() -> None:
    items = tuple(Question(str(n), (str(n * n),)) for n in range(10))
    answers = {str(n): f" {n * n}\n" if n < 7 else "?" for n in range(10)}
    task = Task("squares", TaskKind.EXACT_MATCH, items, digest="abc")
    found = evaluate(task, Known(answers=answers))
    assert (found.task, found.metric, found.value, found.items) == ("squares", Metric.EXACT_MATCH, 0.7, 10)
    assert (found.low, found.high) == pytest.approx(tuple(binomtest(7, 10).proportion_ci(0.95, "wilson")))
    assert (found.digest, found.reference, found.coverage) == ("abc", "", 1)
    assert rights(task, Known(answers=answers)) == [True] * 7 + [False] * 3


def test_a_multiple_choice_counts_right_choices_of_unequal_numbers() -> None:
    items = (Multiple("a", ("x", "y", "z"), 2), Multiple("b", ("x", "y"), 0))
    scores = {("a", "x"): -3, ("a", "y"): -2, ("a", "z"): -1, ("b", "x"): -2, ("b", "y"): -1}
    known = Known(scores={pair: Scored(value, 1) for pair, value in scores.items()})
    task = Task("pick", TaskKind.MULTIPLE_CHOICE, items)
    assert rights(task, known) == [True, False]
    assert evaluate(task, known).value == 0.5
    with pytest.raises(ValueError, match="adds no token to its prompt"):
        rights(task, Known(scores=dict.fromkeys(known.scores, Scored(0.0, 0))))


def test_texts_have_a_perplexity() -> None:
    task = Task("tales", TaskKind.PERPLEXITY, (Text("one"), Text("two")))
    known = Known(scores={("", "one"): Scored(-4.0, 2), ("", "two"): Scored(-2.0, 4)})
    found = evaluate(task, known)
    assert (found.metric, found.tokens) == (Metric.PERPLEXITY, 6)
    assert found.value == pytest.approx(math.e)
    with pytest.raises(ValueError, match="no right answer"):
        rights(task, known)


def test_a_comparison_is_per_token_and_at_the_right_answers() -> None:
    p = Distribution({0: math.log(0.75), 1: math.log(0.25)})
    q = Distribution({0: math.log(0.5), 1: math.log(0.5)})
    nats = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    items = (Question("a", ("right", "also right")), Question("b", ("yes",)))
    task = Task("ask", TaskKind.EXACT_MATCH, items, Settings(format=Form.CHAT))
    reference = Known(expectations={"right": [p, p], "yes": [p]})
    found = compare(task, Known(expectations={"right": [q, p], "yes": [q]}), reference, "whole")
    assert (found.metric, found.reference, found.tokens, found.items) == (Metric.KL, "whole", 3, 2)
    assert found.value == pytest.approx(2 * nats / 3)
    assert found.coverage == pytest.approx(1)
    assert found.low >= 0
    with pytest.raises(ValueError, match="share a tokenizer"):
        compare(task, Known(expectations={"right": [q], "yes": [q]}), reference, "whole")
    with pytest.raises(ValueError, match="at least one token"):
        divergence_result(task, "whole", [0.0, 0.0], [0, 0])
