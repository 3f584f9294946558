"""The cost of a compiled grammar for a step, measured on answers that it allows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]
# The ways to choose the next token among those allowed, which are in the order of their ids.
WALKS: tuple[Callable[[Tokens, np.random.Generator], int], ...] = (
    lambda tokens, random: int(random.choice(tokens)),
    lambda tokens, random: int(tokens[0]),
    lambda tokens, random: int(random.choice(tokens[: max(1, len(tokens) // 64)])),
)


def slowest_mask_s(grammar: Any, mask: Any, tokens: int, enough_s: float, limit_s: float) -> float:
    """The CPU time of a mask of a vLLM grammar: the first beyond `limit_s`, or the slowest of all.

    Each walk has `tokens` tokens; all together take `enough_s`.
    """
    slowest_s, ends_s = 0.0, time.thread_time() + enough_s
    for seed, choose in enumerate(WALKS):
        random = np.random.default_rng(seed)
        grammar.reset()
        for _ in range(tokens):
            began_s = time.thread_time()
            grammar.fill_bitmask(mask, 0)
            slowest_s = max(slowest_s, time.thread_time() - began_s)
            if slowest_s > limit_s or time.thread_time() > ends_s:
                return slowest_s
            allowed = _allowed(mask)
            if not len(allowed):
                break
            began_s = time.thread_time()
            accepted = grammar.accept_tokens("", [choose(allowed, random)])
            slowest_s = max(slowest_s, time.thread_time() - began_s)
            if not accepted or grammar.is_terminated():
                break
    return slowest_s


def _allowed(mask: Any) -> Tokens:
    bits = np.unpackbits(mask[0].numpy().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits)
