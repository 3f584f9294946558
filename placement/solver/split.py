"""The number of layers of each stage: the split with the least latency within each stage's capacity.

A request takes P + n max(D + hops, groups x (slowest stage + gap), turns). P and D are the stages' seconds
for the prompt and for one of n further tokens, linear in layers. With any bound on the slowest stage, the
rest is linear, too, so filling the cheapest stages first is best. Only bounds at which a stage gains a layer
can matter. Limits on the prompt's and a token's seconds (TTFT, TPOT) may exclude the fastest split: then the
fastest split within them is searched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from placement.solver.view import Bools, Floats, Ints
from profiler.plans import even_stages


class Split(NamedTuple):
    """The layers of each stage, and the latency of a request with them."""

    latency_s: float
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Pipeline:
    """Stages in order: most layers, seconds per layer, and what the last stage and the hops add.

    `decode_gaps` are what stages have between two of several batches, in addition. `tokens` is the number of
    tokens after the first, `groups` the batches in flight; every token takes at least `turns_s`. A split must
    not take longer than `max_prompt_s` for the prompt or `max_token_s` for a token.
    """

    caps: Ints
    prefill: Floats
    decode: Floats
    prefill_rest_s: float
    decode_rest_s: float
    decode_gaps: Floats
    hop_prefill_s: float
    hop_decode_s: float
    groups: float
    tokens: int
    turns_s: float = 0.0
    max_prompt_s: float = np.inf
    max_token_s: float = np.inf

    @property
    def beside(self) -> Floats:
        """Seconds of each stage's turn outside its layers."""
        rest = self.decode_gaps.copy()
        rest[-1] += self.decode_rest_s
        return rest

    def seconds(self, layers: Ints, slowest_s: Floats | None = None) -> tuple[Floats, Floats]:
        """Seconds of a prompt and of a token, for each row of `layers` (splits, stages). A given `slowest_s`
        replaces the splits' own slowest stage."""
        if slowest_s is None:
            slowest_s = (layers * self.decode + self.beside).max(axis=1)
        in_row = (layers * self.decode).sum(axis=1) + self.decode_rest_s + self.hop_decode_s
        token: Floats = np.maximum(np.maximum(in_row, self.groups * slowest_s), self.turns_s)
        prompt: Floats = (layers * self.prefill).sum(axis=1) + self.prefill_rest_s + self.hop_prefill_s
        return prompt, token

    def excess_s(self, prompt: Floats, token: Floats) -> Floats:
        """The excess over the limit that is broken most; 0 within both limits."""
        excess: Floats = np.maximum(0.0, np.maximum(prompt - self.max_prompt_s, token - self.max_token_s))
        return excess

    def fastest(self, splits: Ints) -> Split | None:
        """The fastest of these splits within the limits."""
        prompt, token = self.seconds(splits)
        latencies = prompt + self.tokens * token
        latencies[self.excess_s(prompt, token) > 0] = np.inf
        best = int(np.argmin(latencies)) if len(splits) else -1
        if best < 0 or latencies[best] == np.inf:
            return None
        return Split(float(latencies[best]), tuple(splits[best].tolist()))


def best_split(pipeline: Pipeline, layers: int) -> Split | None:
    """The best split, at least one layer on each stage; None if the stages cannot hold the layers within
    the limits."""
    caps = pipeline.caps
    if caps.min() < 1 or caps.sum() < layers:
        return None
    cheapest = pipeline.prefill + pipeline.tokens * pipeline.decode
    splits = _fill(caps[None, :], cheapest, layers)
    decode = splits[0] * pipeline.decode
    decode[-1] += pipeline.decode_rest_s
    slowest_s = max(pipeline.groups * (decode + pipeline.decode_gaps).max(), pipeline.turns_s)
    if slowest_s > decode.sum() + pipeline.hop_decode_s:  # the batches' turns set the pace
        bounded = _bounded(pipeline)
        splits = np.concatenate(
            [splits, _fill(bounded, cheapest, layers), _fill(bounded, pipeline.prefill, layers)]
        )
    prompt, token = pipeline.seconds(splits)
    latencies = prompt + pipeline.tokens * token
    best = int(np.argmin(latencies))
    if prompt[best] > pipeline.max_prompt_s or token[best] > pipeline.max_token_s:
        return _best_within(pipeline, layers)
    return Split(float(latencies[best]), tuple(splits[best].tolist()))


def _best_within(pipeline: Pipeline, layers: int) -> Split | None:
    """The best split if a limit excludes the fastest one.

    Stages of one kind have the same ratio of prompt to token time. So for any slowest stage, and any number
    of layers on a kind of stage, filling its cheapest stages first is best for prompt, token and latency.
    """
    caps = _bounded(pipeline)
    slowest_s = (caps * pipeline.decode + pipeline.beside).max(axis=1)
    caps = caps[(caps.sum(axis=1) >= layers) & (pipeline.groups * slowest_s <= pipeline.max_token_s)]
    if not len(caps):
        return None
    weights = (pipeline.prefill + pipeline.tokens * pipeline.decode, pipeline.prefill, pipeline.decode)
    proportions = np.round(pipeline.prefill / pipeline.decode, 9)
    kinds = [proportions == one for one in np.unique(proportions)]
    splits = [_fill(caps, cost, layers) for cost in weights]
    if len(kinds) == 2:
        splits.append(_shared_out(pipeline, caps, layers, kinds[0], weights[0]))
    elif len(kinds) > 2:
        splits += [_shared_out(pipeline, caps, layers, kind, cost) for kind in kinds for cost in weights]
    return pipeline.fastest(np.concatenate(splits))


def _shared_out(pipeline: Pipeline, caps: Ints, layers: int, kind: Bools, cost: Floats) -> Ints:
    """For each row of `caps`, the best split between the stages of a kind and the others, which fill by
    `cost`.

    The seconds of prompt and token are convex in the number of layers that the kind takes, if the others are
    of one kind: if one more layer is no better, further layers are not either. So the number is found by
    halving.
    """
    slowest_s = (caps * pipeline.decode + pipeline.beside).max(axis=1)
    room, spare = caps - 1, layers - caps.shape[1]
    order = np.argsort(cost[kind], kind="stable")
    before = np.empty_like(room[:, kind])
    before[:, order] = np.cumsum(room[:, kind][:, order], axis=1) - room[:, kind][:, order]

    def split(taken: Ints) -> Ints:
        limited = caps.copy()
        limited[:, kind] = 1 + np.clip(taken[:, None] - before, 0, room[:, kind])
        return _filled(limited, np.where(kind, -np.inf, cost), layers)

    def measured(taken: Ints) -> tuple[Floats, Floats]:
        prompt, token = pipeline.seconds(split(taken), slowest_s)
        return pipeline.excess_s(prompt, token), prompt + pipeline.tokens * token

    low = np.maximum(0, spare - room[:, ~kind].sum(axis=1))
    high = np.minimum(spare, room[:, kind].sum(axis=1))
    while (low < high).any():
        middle = (low + high) // 2
        (excess, latency), (more_excess, more_latency) = measured(middle), measured(middle + 1)
        better = np.where(more_excess == excess, more_latency < latency, more_excess < excess)
        low, high = np.where(better & (low < high), middle + 1, low), np.where(better, high, middle)
    return split(low)


def even_split(pipeline: Pipeline, layers: int) -> Split | None:
    """As `best_split`, for the engine's own split only."""
    return given_split(pipeline, even_stages(layers, len(pipeline.caps)))


def given_split(pipeline: Pipeline, layers: tuple[int, ...]) -> Split | None:
    """This split; None if the stages cannot hold the layers within the limits."""
    if any(n > cap for n, cap in zip(layers, pipeline.caps.tolist(), strict=True)):
        return None
    return pipeline.fastest(np.array([layers]))


def _bounded(pipeline: Pipeline) -> Ints:
    """The caps for every bound on the slowest stage at which a cap changes."""
    rest = pipeline.beside
    counts = np.arange(1, pipeline.caps.max() + 1)[:, None]
    seconds = np.where(counts <= pipeline.caps, counts * pipeline.decode + rest, np.inf)
    bounds = np.unique(seconds)
    bounds = bounds[np.isfinite(bounds)][:, None] * (1 + 1e-12)
    fits = np.floor((bounds - rest) / pipeline.decode).astype(np.int64)
    caps: Ints = np.minimum(fits, pipeline.caps)
    possible: Ints = caps[(caps >= 1).all(axis=1)]
    return possible


def _fill(caps: Ints, cost: Floats, layers: int) -> Ints:
    """As `_filled`; rows of `caps` with too little capacity are left out."""
    return _filled(caps[caps.sum(axis=1) >= layers], cost, layers)


def _filled(caps: Ints, cost: Floats, layers: int) -> Ints:
    """One layer on each stage, then the cheapest stages first."""
    order = np.argsort(cost, kind="stable")
    room = (caps - 1)[:, order]
    before = np.cumsum(room, axis=1) - room
    taken = np.clip(layers - caps.shape[1] - before, 0, room)
    filled: Ints = np.empty_like(taken)
    filled[:, order] = taken + 1
    return filled
