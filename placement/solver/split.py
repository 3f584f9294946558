"""How many layers each stage takes: the split of least latency within what each stage can hold.

A request takes P + n max(D + hops, groups x (slowest stage + gap), turns): P and D are the stages' seconds
for the prompt and for one of n further tokens, linear in layers. With any bound on the slowest stage so is
the rest, so filling the cheapest stages first is best; and only bounds at which a stage gains a layer can
matter. Limits on the prompt's and a token's seconds (TTFT, TPOT) may rule the fastest split out: then the
fastest within them is looked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.solver.view import Bools, Floats, Ints
from profiler.plans import even_stages


@dataclass(frozen=True)
class Pipeline:
    """Stages in order: most layers, seconds per layer, and what the last stage and the hops add.

    `decode_gaps` are what stages have between two of several batches, beside that. `tokens` are those after
    the first, `groups` the batches in flight; none takes less than `turns_s`. No split may take longer than
    `max_prompt_s` for the prompt or `max_token_s` for a token.
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
        """Seconds of each stage's turn that its layers do not take."""
        rest = self.decode_gaps.copy()
        rest[-1] += self.decode_rest_s
        return rest

    def seconds(self, layers: Ints, slowest_s: Floats | None = None) -> tuple[Floats, Floats]:
        """A prompt's and a token's, of each row of `layers`, (splits, stages). A slowest stage that is given
        stands for that of the splits."""
        if slowest_s is None:
            slowest_s = (layers * self.decode + self.beside).max(axis=1)
        in_row = (layers * self.decode).sum(axis=1) + self.decode_rest_s + self.hop_decode_s
        token: Floats = np.maximum(np.maximum(in_row, self.groups * slowest_s), self.turns_s)
        prompt: Floats = (layers * self.prefill).sum(axis=1) + self.prefill_rest_s + self.hop_prefill_s
        return prompt, token

    def excess_s(self, prompt: Floats, token: Floats) -> Floats:
        """By how much the limit that is broken most is broken; 0 within both."""
        excess: Floats = np.maximum(0.0, np.maximum(prompt - self.max_prompt_s, token - self.max_token_s))
        return excess

    def fastest(self, splits: Ints) -> tuple[float, tuple[int, ...]] | None:
        """Latency and layers of the fastest of these splits that is within the limits."""
        prompt, token = self.seconds(splits)
        latencies = prompt + self.tokens * token
        latencies[self.excess_s(prompt, token) > 0] = np.inf
        best = int(np.argmin(latencies)) if len(splits) else -1
        if best < 0 or latencies[best] == np.inf:
            return None
        return float(latencies[best]), tuple(splits[best].tolist())


def best_split(pipeline: Pipeline, layers: int) -> tuple[float, tuple[int, ...]] | None:
    """Latency and layers by stage, at least one each; None when the stages cannot hold them within the
    limits."""
    caps = pipeline.caps
    if caps.min() < 1 or caps.sum() < layers:
        return None
    cheapest = pipeline.prefill + pipeline.tokens * pipeline.decode
    splits = _fill(caps[None, :], cheapest, layers)
    decode = splits[0] * pipeline.decode
    decode[-1] += pipeline.decode_rest_s
    slowest_s = max(pipeline.groups * (decode + pipeline.decode_gaps).max(), pipeline.turns_s)
    if slowest_s > decode.sum() + pipeline.hop_decode_s:  # what comes in turn sets the pace
        bounded = _bounded(pipeline)
        splits = np.concatenate(
            [splits, _fill(bounded, cheapest, layers), _fill(bounded, pipeline.prefill, layers)]
        )
    prompt, token = pipeline.seconds(splits)
    latencies = prompt + pipeline.tokens * token
    best = int(np.argmin(latencies))
    if prompt[best] > pipeline.max_prompt_s or token[best] > pipeline.max_token_s:
        return _best_within(pipeline, layers)
    return float(latencies[best]), tuple(splits[best].tolist())


def _best_within(pipeline: Pipeline, layers: int) -> tuple[float, tuple[int, ...]] | None:
    """Where a limit rules the fastest split out.

    Stages of one kind take prompts and tokens in one proportion. So whatever the slowest stage and however
    many layers a kind takes, its cheapest stages first is best for prompt, token and latency.
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
    """Of each row of `caps`, the best split between the stages of a kind and the others, these by `cost`.

    The seconds of prompt and token are convex in the layers that the kind takes, if the others are of one:
    where one layer more is no better, no more are. So that number is found by halving.
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


def even_split(pipeline: Pipeline, layers: int) -> tuple[float, tuple[int, ...]] | None:
    """As `best_split`, of the engine's own split alone."""
    return given_split(pipeline, even_stages(layers, len(pipeline.caps)))


def given_split(pipeline: Pipeline, split: tuple[int, ...]) -> tuple[float, tuple[int, ...]] | None:
    """Latency and layers by stage; None when the stages cannot hold them within the limits."""
    if any(n > cap for n, cap in zip(split, pipeline.caps.tolist(), strict=True)):
        return None
    return pipeline.fastest(np.array([split]))


def _bounded(pipeline: Pipeline) -> Ints:
    """The caps under every bound on the slowest stage at which one of them changes."""
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
    """As `_filled`; rows of `caps` that hold too little are left out."""
    return _filled(caps[caps.sum(axis=1) >= layers], cost, layers)


def _filled(caps: Ints, cost: Floats, layers: int) -> Ints:
    """One layer each, then the cheapest stages first."""
    order = np.argsort(cost, kind="stable")
    room = (caps - 1)[:, order]
    before = np.cumsum(room, axis=1) - room
    taken = np.clip(layers - caps.shape[1] - before, 0, room)
    filled: Ints = np.empty_like(taken)
    filled[:, order] = taken + 1
    return filled
