"""Items of tasks, what is asked of a model for them, and what it answers."""

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
    """How a prompt is given to the model: as it stands, or as a user's message in its chat template."""

    RAW = "raw"
    CHAT = "chat"


class Likelihood(StrEnum):
    """What the choices of an item are compared by: log-probability, or the same per byte of the choice."""

    TOTAL = "total"
    PER_BYTE = "per_byte"


@dataclass(frozen=True)
class Question:
    """Right if the greedy answer to `prompt` is one of `answers`, both normalised."""

    prompt: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Multiple:
    """Right if `choices[answer]` is the most likely continuation of `prompt`."""

    prompt: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Text:
    text: str


Item = Question | Multiple | Text


@dataclass(frozen=True)
class Settings:
    """How a task's items are asked and scored. `max_tokens` and `stop` end an answer."""

    max_tokens: int = 32
    stop: tuple[str, ...] = ()
    normalise: Normalise = Normalise.SPACE
    format: Form = Form.RAW
    likelihood: Likelihood = Likelihood.TOTAL


@dataclass(frozen=True)
class Pair:
    """A text and where the part of it begins that is scored; in a chat, a user's message and its answer.

    An empty `context` scores the whole text, but for its first token, which nothing predicts.
    """

    context: str
    continuation: str
    form: Form = Form.RAW


@dataclass(frozen=True)
class Scored:
    """The sum of ln p of a continuation's tokens, each given all before it, and how many tokens these are."""

    logprob: float
    tokens: int


@dataclass(frozen=True)
class Distribution:
    """What a model expects at one position: ln p by token id, of some tokens only.

    These are the most likely ones and the one that is there; the rest of the mass is not told apart.
    """

    logprobs: Mapping[int, float]


class Answerer(Protocol):
    """A model that answers. Everything is greedy: asked again, it answers the same.

    A continuation's tokens are those after the longest common prefix of the tokens of `context` and of
    `context + continuation`, so that a token across the boundary counts.
    """

    def generate(self, prompts: Sequence[str], settings: Settings) -> list[str]:
        """The answer to each prompt, up to `settings.stop` or the model's own end."""

    def score(self, pairs: Sequence[Pair]) -> list[Scored]:
        """The log-probability of each continuation."""

    def distributions(self, pairs: Sequence[Pair]) -> list[list[Distribution]]:
        """For each pair what is expected at each of its continuation's tokens."""
