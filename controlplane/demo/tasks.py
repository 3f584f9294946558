"""The tasks of the demo's adapters, with held-out problems. Pure; needs no dataset package."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ADAPTERS = Path(__file__).parent / "adapters"
BASE = "smollm2-135m-instruct"


@dataclass(frozen=True)
class Problem:
    """One question as the user's only message, and its correct answer."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Task:
    """A skill that one shipped LoRA adapter adds to the base model.

    `normalise` reduces a model's whole reply to the part that is compared with the answer.
    """

    name: str
    description: str
    normalise: Callable[[str], str]
    max_tokens: int

    @property
    def adapter(self) -> Path:
        """The PEFT folder."""
        return ADAPTERS / self.name

    @cached_property
    def problems(self) -> tuple[Problem, ...]:
        """Problems that training never saw."""
        rows = json.loads((self.adapter / "heldout.json").read_text(encoding="utf-8"))
        return tuple(Problem(row["prompt"], row["answer"]) for row in rows)

    def is_right(self, reply: str, answer: str) -> bool:
        return self.normalise(reply) == self.normalise(answer)

    def score(self, replies: Sequence[str]) -> float:
        """The fraction answered right, `replies[i]` being the reply to `problems[i]`."""
        pairs = list(zip(replies, self.problems, strict=True))
        return sum(self.is_right(reply, problem.answer) for reply, problem in pairs) / len(pairs)


def last_number(reply: str) -> str:
    """The last integer of the reply, so that `The sum is 42.` counts as `42`."""
    numbers = re.findall(r"-?\d+", reply.replace(",", ""))
    return str(int(numbers[-1])) if numbers else ""


def last_word(reply: str) -> str:
    """The last word in lower case, so that `Anna is his Mother.` counts as `mother`."""
    words = re.findall(r"[a-z]+(?:-[a-z]+)*", reply.lower())
    return words[-1] if words else ""


TASKS = {
    task.name: task
    for task in (
        Task(
            "kinship",
            "Reads a short family history and answers how two people are related, in one word.",
            last_word,
            max_tokens=8,
        ),
        Task(
            "arithmetic",
            "Adds and subtracts two to four numbers of one or two digits, and answers with the number.",
            last_number,
            max_tokens=12,
        ),
    )
}
