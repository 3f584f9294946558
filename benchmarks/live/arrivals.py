"""The sent requests and their times: seeded Poisson arrivals of mixed lengths. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.live.streaming import Ask
from benchmarks.serving.workload import arrivals

LENGTHS = ((24, 16), (48, 24), (96, 32), (192, 32), (320, 48))  # prompt and answer, tokens
REHEARSED_LENGTHS = ((6, 4), (12, 6))


@dataclass(frozen=True)
class Share:
    """A part of all requests: by whom, with which headers."""

    share: float
    group: str = ""
    tenant: str = ""
    headers: tuple[tuple[str, str], ...] = ()


ANYBODY = (Share(1.0),)


@dataclass(frozen=True)
class Mix:
    """Requests for all `models` are equally likely."""

    models: tuple[str, ...]
    lengths: Sequence[tuple[int, int]] = LENGTHS
    shares: Sequence[Share] = ANYBODY


def drawn(mix: Mix, rng: np.random.Generator) -> Callable[[float], Ask]:
    """A request at a time, the next of this generator's."""
    weights = np.array([share.share for share in mix.shares])

    def draw(at_s: float) -> Ask:
        share = mix.shares[int(rng.choice(len(weights), p=weights / weights.sum()))]
        prompt, output = mix.lengths[int(rng.integers(len(mix.lengths)))]
        model = mix.models[int(rng.integers(len(mix.models)))]
        return Ask(at_s, model, prompt, output, share.group, share.tenant, dict(share.headers))

    return draw


def poisson(mix: Mix, rate: float, seconds: float, seed: int) -> list[Ask]:
    times = arrivals(rate, seconds, 1.0, np.random.default_rng([seed, 0]))
    draw = drawn(mix, np.random.default_rng([seed, 1]))
    return [draw(float(at_s)) for at_s in times]


def endless(mix: Mix, seed: int) -> Iterator[Ask]:
    """For clients that ask as soon as they can."""
    draw = drawn(mix, np.random.default_rng([seed, 2]))
    while True:
        yield draw(0.0)
