"""How many layers each stage takes: the split of least latency within what each stage can hold.

A request takes P + n max(D + hops, groups x (slowest stage + gap), turns): P and D are the stages' seconds
for the prompt and for one of n further tokens, linear in layers. With any bound on the slowest stage so is
the rest, so filling the cheapest stages first is best; and only bounds at which a stage gains a layer can
matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.solver.view import Floats, Ints
from profiler.plans import even_stages


@dataclass(frozen=True)
class Pipeline:
    """Stages in order: most layers, seconds per layer, and what the last stage and the hops add.

    `decode_gaps` are what stages have between two of several batches, beside that. `tokens` are those after
    the first, `groups` the batches in flight; none takes less than `turns_s`.
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

    def latency_s(self, layers: Ints) -> Floats:
        """Of each row of `layers`, (splits, stages)."""
        decode = layers * self.decode
        decode[:, -1] += self.decode_rest_s
        slowest = (decode + self.decode_gaps).max(axis=1)
        paced = np.maximum(decode.sum(axis=1) + self.hop_decode_s, self.groups * slowest)
        paced = np.maximum(paced, self.turns_s)
        prompt = (layers * self.prefill).sum(axis=1) + self.prefill_rest_s + self.hop_prefill_s
        total: Floats = prompt + self.tokens * paced
        return total


def best_split(pipeline: Pipeline, layers: int) -> tuple[float, tuple[int, ...]] | None:
    """Latency and layers by stage, at least one each; None when the stages cannot hold them."""
    caps = pipeline.caps
    if caps.min() < 1 or caps.sum() < layers:
        return None
    cheapest = pipeline.prefill + pipeline.tokens * pipeline.decode
    free = _fill(caps[None, :], cheapest, layers)
    decode = free[0] * pipeline.decode
    decode[-1] += pipeline.decode_rest_s
    splits = free
    slowest_s = max(pipeline.groups * (decode + pipeline.decode_gaps).max(), pipeline.turns_s)
    if slowest_s > decode.sum() + pipeline.hop_decode_s:  # what comes in turn sets the pace
        bounded = _bounded(pipeline)
        splits = np.concatenate(
            [free, _fill(bounded, cheapest, layers), _fill(bounded, pipeline.prefill, layers)]
        )
    latencies = pipeline.latency_s(splits)
    best = int(np.argmin(latencies))
    return float(latencies[best]), tuple(splits[best].tolist())


def even_split(pipeline: Pipeline, layers: int) -> tuple[float, tuple[int, ...]] | None:
    """As `best_split`, of the engine's own split alone."""
    return given_split(pipeline, even_stages(layers, len(pipeline.caps)))


def given_split(pipeline: Pipeline, split: tuple[int, ...]) -> tuple[float, tuple[int, ...]] | None:
    """Latency and layers by stage; None when the stages cannot hold them."""
    if any(n > cap for n, cap in zip(split, pipeline.caps.tolist(), strict=True)):
        return None
    return float(pipeline.latency_s(np.array([split]))[0]), split


def _bounded(pipeline: Pipeline) -> Ints:
    """The caps under every bound on the slowest stage at which one of them changes."""
    rest = pipeline.decode_gaps.copy()
    rest[-1] += pipeline.decode_rest_s
    counts = np.arange(1, pipeline.caps.max() + 1)[:, None]
    seconds = np.where(counts <= pipeline.caps, counts * pipeline.decode + rest, np.inf)
    bounds = np.unique(seconds)
    bounds = bounds[np.isfinite(bounds)][:, None] * (1 + 1e-12)
    fits = np.floor((bounds - rest) / pipeline.decode).astype(np.int64)
    caps: Ints = np.minimum(fits, pipeline.caps)
    possible: Ints = caps[(caps >= 1).all(axis=1)]
    return possible


def _fill(caps: Ints, cost: Floats, layers: int) -> Ints:
    """One layer each, then the cheapest stages first; rows of `caps` that hold too little are left out."""
    caps = caps[caps.sum(axis=1) >= layers] - 1
    order = np.argsort(cost, kind="stable")
    room = caps[:, order]
    before = np.cumsum(room, axis=1) - room
    taken = np.clip(layers - caps.shape[1] - before, 0, room)
    filled: Ints = np.empty_like(taken)
    filled[:, order] = taken + 1
    return filled
