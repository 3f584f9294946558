"""Items of tasks, the requests to a model for them, and its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from profiler.evaluation.normalising import Normalise


class TaskKind(StrEnum):
    EXACT_MATCH = "exact_match"
    MULTIPLE_CHOICE = "multiple_choice"
    PERPLEXITY = "perplexity"


class Form(StrEnum):
    """How the model receives a prompt: unchanged, or as a user's message in its chat template."""

    RAW = "raw"
    CHAT = "chat"


class Likelihood(StrEnum):
    """How the choices of an item are compared: by log-probability, or by log-probability per byte."""

    TOTAL = "total"
    PER_BYTE = "per_byte"


@dataclass(frozen=True)
class Question:
    """A question; the greedy answer to `prompt` is right if it equals one of `answers`, both normalised."""

    prompt: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Multiple:
    """A multiple choice; it is right if `choices[answer]` is the most likely continuation of `prompt`."""

    prompt: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Text:
    text: str


Item = Question | Multiple | Text


@dataclass(frozen=True)
class Settings:
    """How a task's items are asked and scored. An answer ends at `max_tokens` or at `stop`."""

    max_tokens: int = 32
    stop: tuple[str, ...] = ()
    normalise: Normalise = Normalise.SPACE
    format: Form = Form.RAW
    likelihood: Likelihood = Likelihood.TOTAL


@dataclass(frozen=True)
class Pair:
    """A text in two parts, of which the second is scored; in a chat, a user's message and its answer.

    With an empty `context` the whole text is scored, except its first token, which nothing predicts.
    """

    context: str
    continuation: str
    form: Form = Form.RAW


@dataclass(frozen=True)
class Scored:
    """The sum of ln p of a continuation's tokens, each given all earlier tokens, and the number of tokens."""

    logprob: float
    tokens: int


@dataclass(frozen=True)
class Distribution:
    """A model's distribution at one position: ln p by token id, for some tokens only.

    The most likely tokens and the actual token are listed; the rest of the mass is not split by token.
    """

    logprobs: Mapping[int, float]


class Answerer(Protocol):
    """A model that answers. It decodes greedily: the same question gets the same answer.

    A continuation's tokens are those after the longest common prefix of the tokens of `context` and of
    `context + continuation`, so a token across the boundary counts.
    """

    def generate(self, prompts: Sequence[str], settings: Settings) -> list[str]:
        """The answer to each prompt, up to `settings.stop` or the model's own end."""

    def score(self, pairs: Sequence[Pair]) -> list[Scored]:
        """The log-probability of each continuation."""

    def distributions(self, pairs: Sequence[Pair]) -> list[list[Distribution]]:
        """The distributions at each continuation's tokens, for each pair."""
