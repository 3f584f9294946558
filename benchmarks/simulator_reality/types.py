"""The loads, their figures, and the facts about the engines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Asked:
    """`model` 0 is the base, the others are variants in their order. Lengths in tokens."""

    at_s: float
    model: int
    prompt: int
    output: int


@dataclass(frozen=True)
class Timed:
    """Seconds: from when it was due to its first and last token, and from token to token."""

    ttft_s: float
    tpot_s: float
    total_s: float


# Asks them all, each when it is due. Raises RuntimeError for one that is not answered.
Play = Callable[[Sequence[Asked]], Awaitable[list[Timed]]]


@dataclass(frozen=True)
class VariantFacts:
    name: str
    kind: str
    rank: int
    size_bytes: int


@dataclass(frozen=True)
class Facts:
    """Each of `groups` engines runs `rows` requests at once, of at most `batched_tokens` in a step, and has
    `kv_tokens` cached; a gateway sends it `max_ongoing` at most. `policy` is the router's. `path_s`: from the
    client to the engine and back, where it is known. Steps from `wide_from` tokens on are wide; 0: none."""

    groups: int
    rows: int
    slots: int
    kv_tokens: int
    batched_tokens: int
    max_model_len: int
    max_ongoing: int
    policy: str
    path_s: float
    variants: tuple[VariantFacts, ...]
    wide_from: int = 0
