"""The split of layers over stages, with limits on prompt and token, against all splits there are."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from placement.solver.split import Pipeline, best_split
from testkit.placement_brute_force import Rows, compositions

ROUNDING = 1 + 1e-9


def pipeline(rng: random.Random, kinds: int) -> tuple[Pipeline, int]:
    """Two to five stages on busy and idle GPUs of some kinds, and layers for them."""
    stages = rng.randint(2, 5)
    layers = rng.randint(stages + 1, 14)
    types = [(rng.uniform(3e-4, 3e-3), rng.uniform(1e-4, 1e-3)) for _ in range(kinds)]
    seconds = np.array([rng.choice(types) for _ in range(stages)])
    slowdown = np.array([rng.choice((1.0, rng.uniform(1, 8))) for _ in range(stages)])
    gaps = [rng.choice((0.0, 1e-3)) for _ in range(stages - 1)]
    found = Pipeline(
        caps=np.array([rng.randint(1, layers) for _ in range(stages)]),
        prefill=slowdown * seconds[:, 0],
        decode=slowdown * seconds[:, 1],
        prefill_rest_s=rng.uniform(0, 2e-3),
        decode_rest_s=rng.uniform(0, 1e-3),
        decode_gaps=np.array([*gaps, 0.0]),
        hop_prefill_s=1e-3,
        hop_decode_s=1e-4,
        groups=rng.uniform(1, stages),
        tokens=rng.choice((0, 1, 31)),
        turns_s=rng.choice((0.0, 5e-3)),
    )
    return found, layers


def times(stages: Pipeline, splits: Rows) -> tuple[Rows, Rows]:
    """A prompt's and a token's seconds of each split, written down again from the definition."""
    decode = splits * stages.decode
    decode[:, -1] += stages.decode_rest_s
    turn = stages.groups * (decode + stages.decode_gaps).max(axis=1)
    token = np.maximum(np.maximum(decode.sum(axis=1) + stages.hop_decode_s, turn), stages.turns_s)
    return (splits * stages.prefill).sum(axis=1) + stages.prefill_rest_s + stages.hop_prefill_s, token


@pytest.mark.parametrize("kinds", [1, 2, 3])
def test_the_fastest_split_within_limits_is_found(kinds: int) -> None:
    """Limits are what some split takes whose prompt is quicker than the fastest split's."""
    ruled_out = 0
    for seed in range(400):
        rng = random.Random(seed)
        stages, layers = pipeline(rng, kinds)
        splits = compositions(layers, len(stages.caps))
        splits = splits[(splits <= stages.caps).all(axis=1)]
        if not len(splits):
            assert best_split(stages, layers) is None
            continue
        prompt, token = times(stages, splits)
        latency = prompt + stages.tokens * token
        quicker = np.flatnonzero(prompt < prompt[latency.argmin()] / ROUNDING)
        if not len(quicker):
            continue
        asked = rng.choice(quicker.tolist())
        max_prompt_s = float(prompt[asked]) * ROUNDING
        max_token_s = rng.choice((np.inf, float(token[asked]) * rng.choice((ROUNDING, 0.99))))
        within = (prompt <= max_prompt_s) & (token <= max_token_s)
        found = best_split(replace(stages, max_prompt_s=max_prompt_s, max_token_s=max_token_s), layers)
        assert (found is not None) == bool(within.any()), seed
        if found is None:
            continue
        ruled_out += 1
        at = int(np.flatnonzero((splits == found.layers).all(axis=1))[0])
        assert within[at]
        assert found.latency_s == pytest.approx(latency[at])
        assert found.latency_s <= latency[within].min() * 1.005, seed
    assert ruled_out > 10
