"""A checkpoint's answers in batches equal transformers' results for each text by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from profiler.evaluation.evaluate import pair_of
from profiler.evaluation.types import Form, Multiple, Pair, Question, Settings
from testkit import random_variants
from testkit.gemma3_models import WINDOW, write_gemma3
from workers.evaluation.encoding import batches
from workers.evaluation.torch_answerer import TorchAnswerer, before_stop

pytestmark = pytest.mark.slow

PAIRS = (
    Pair("The capital of France is", " Paris, of course."),
    Pair("The capital of France is ", "Paris"),  # the space is the answer's token's
    Pair("", "Once upon a time, in a village by the sea, there lived a fisherman."),
    Pair("caf", "\u00e9 \U0001f600"),  # tokens that are parts of characters
    Pair("one", "two"),
    Pair("a", ""),
)
PROMPTS = ("Once upon a time", "2 + 2 =", "The capital of France is")


@pytest.fixture(scope="module")
def folder(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_variants.first_layers(smollm2_folder, tmp_path_factory.mktemp("evaluated") / "base", 2)


@pytest.fixture(scope="module")
def answerer(folder: Path) -> TorchAnswerer:
    return TorchAnswerer.open(folder, "cpu", top=7)


class Alone:
    """One text at a time, without padding."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    @torch.no_grad()
    def logprobs(self, text: str) -> tuple[list[int], torch.Tensor]:
        """The ids [n], and ln p of every token at positions 1 to n-1 [n-1, vocabulary]."""
        ids = self.tokenizer(text).input_ids
        return ids, self.model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)


def test_continuations_are_scored_as_one_at_a_time(answerer: TorchAnswerer, folder: Path) -> None:
    alone = Alone(folder)
    for pair, scored in zip(PAIRS, answerer.score(PAIRS), strict=True):
        ids, logprobs = alone.logprobs(pair.context + pair.continuation)
        before = alone.tokenizer(pair.context).input_ids if pair.context else []
        start = next((i for i, (a, b) in enumerate(zip(ids, before, strict=False)) if a != b), len(before))
        start = max(min(start, len(ids)), 1)
        expected = [float(logprobs[i - 1, ids[i]]) for i in range(start, len(ids))]
        assert scored.tokens == len(expected)
        assert scored.logprob == pytest.approx(sum(expected), abs=1e-3)
    assert answerer.score(PAIRS)[-1].tokens == 0


def test_windows_are_those_of_each_text(tmp_path: Path) -> None:
    """Texts longer than Gemma 3's windows, filled up to the longest."""
    folder = write_gemma3(tmp_path / "gemma3")
    alone, answerer = Alone(folder), TorchAnswerer.open(folder, "cpu")
    texts = [" ".join(f"w{3 + (i * i + n) % 90}" for i in range(n)) for n in (3 * WINDOW, 4 * WINDOW, 5)]
    for text, scored in zip(texts, answerer.score([Pair("", text) for text in texts]), strict=True):
        ids, logprobs = alone.logprobs(text)
        expected = logprobs.gather(1, torch.tensor(ids[1:])[:, None]).sum()
        assert scored.logprob == pytest.approx(float(expected), abs=1e-3)
    for text, answer in zip(texts, answerer.generate(texts, Settings(max_tokens=4)), strict=True):
        ids = alone.tokenizer(text).input_ids
        assert answer
        for word in answer.split():
            best = alone.model(torch.tensor([ids])).logits[0, -1].argmax()
            assert alone.tokenizer.decode([best]) == word
            ids.append(int(best))


def test_distributions_hold_the_likeliest_tokens_and_the_one_that_is_there(
    answerer: TorchAnswerer, folder: Path
) -> None:
    ids, logprobs = Alone(folder).logprobs(PAIRS[2].continuation)
    (found,) = answerer.distributions([PAIRS[2]])
    assert len(found) == len(ids) - 1
    for distribution, own, row in zip(found, ids[1:], logprobs, strict=True):
        wanted = {*row.topk(7).indices.tolist(), own}
        assert distribution.logprobs.keys() == wanted
        for token, value in distribution.logprobs.items():
            assert value == pytest.approx(float(row[token]), abs=1e-4)


@pytest.mark.parametrize("form", Form)
def test_greedy_answers_in_a_batch_are_those_of_one_at_a_time(
    answerer: TorchAnswerer, folder: Path, form: Form
) -> None:
    alone = Alone(folder)
    found = answerer.generate(PROMPTS, Settings(max_tokens=6, format=form))
    for prompt, answer in zip(PROMPTS, found, strict=True):
        text = prompt
        if form is Form.CHAT:
            messages = [{"role": "user", "content": prompt}]
            text = alone.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = alone.tokenizer(text, add_special_tokens=False).input_ids
        new: list[int] = []
        while len(new) < 6:
            with torch.no_grad():
                best = int(alone.model(torch.tensor([ids + new])).logits[0, -1].argmax())
            if best in (alone.tokenizer.eos_token_id, alone.model.generation_config.eos_token_id):
                break
            new.append(best)
        assert answer == alone.tokenizer.decode(new, skip_special_tokens=True)


def test_a_chats_answer_is_scored_after_the_template(answerer: TorchAnswerer, folder: Path) -> None:
    alone = Alone(folder)
    messages = [{"role": "user", "content": "Who?"}]
    before = alone.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    start = len(alone.tokenizer(before).input_ids)
    ids, logprobs = alone.logprobs(before + "Nobody.")
    expected = [float(logprobs[i - 1, ids[i]]) for i in range(start, len(ids))]
    (scored,) = answerer.score([Pair("Who?", "Nobody.", Form.CHAT)])
    assert scored.tokens == len(expected)
    assert scored.logprob == pytest.approx(sum(expected), abs=1e-3)


def test_only_the_right_answer_is_compared() -> None:
    assert pair_of(Question("a", ("b", "c")), Form.CHAT) == Pair("a", "b", Form.CHAT)
    assert pair_of(Multiple("a", ("b", "c"), 1), Form.RAW) == Pair("a", "c")


@pytest.mark.parametrize(("lengths", "limit"), [([3, 9, 1, 4, 4], 10), ([5], 1), ([], 8), ([2] * 7, 6)])
def test_batches_hold_all_once_within_the_limit(lengths: list[int], limit: int) -> None:
    made = list(batches(lengths, limit))
    assert sorted(i for batch in made for i in batch) == list(range(len(lengths)))
    assert all(len(b) == 1 or len(b) * max(lengths[i] for i in b) <= limit for b in made)


def test_an_answer_ends_before_the_first_stop() -> None:
    assert before_stop("one\ntwo. three", [".", "\n"]) == "one"
    assert before_stop("one", ["x"]) == "one"
