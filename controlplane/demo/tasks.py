"""What the demo's adapters are good at, with held-out problems to show it. Pure; needs no dataset package."""

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
    """One question as the user's only message, and the answer that counts."""

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
    found = re.findall(r"-?\d+", reply.replace(",", ""))
    return str(int(found[-1])) if found else ""


def last_word(reply: str) -> str:
    """The last word in lower case, so that `Anna is his Mother.` counts as `mother`."""
    found = re.findall(r"[a-z]+(?:-[a-z]+)*", reply.lower())
    return found[-1] if found else ""


def last_line(reply: str) -> str:
    """The last line that is not blank, without outer quotes or a final full stop, single spaces."""
    lines = [line for line in reply.splitlines() if line.strip()]
    return " ".join(lines[-1].split()).strip("\"'`. ") if lines else ""
