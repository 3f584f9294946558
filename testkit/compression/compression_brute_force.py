"""The exact optimum of equation 1 for 2:4 sparse rows of 4 or 8 weights, and problems for methods.

It tries every choice of two of four positions and every pair of codes, in float64. It uses nothing of the
code under test.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from workers.compression.types import Inputs, Problem

Array = NDArray[Any]


def fours(bits: int) -> Array:
    """All groups of four codes that 2:4 can hold, minus the zero point: [n, 4]."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    found = {(0, 0, 0, 0)}
    for i, j in itertools.combinations(range(4), 2):
        for a, b in itertools.product(range(low, high + 1), repeat=2):
            codes = [0, 0, 0, 0]
            codes[i], codes[j] = a, b
            found.add((codes[0], codes[1], codes[2], codes[3]))
    return np.array(sorted(found), dtype=np.float64)


def least_error(row: Array, gram: Array, scales: Array, bits: int) -> float:
    """The least (w - row) H (w - row) over all 2:4 coded w [4 or 8] whose fours have the given scales."""
    choices = fours(bits)
    offsets = [choices * scales[i] - row[4 * i : 4 * i + 4] for i in range(len(row) // 4)]
    costs = [
        np.einsum("ni,ij,nj->n", offset, gram[4 * i : 4 * i + 4, 4 * i : 4 * i + 4], offset)
        for i, offset in enumerate(offsets)
    ]
    if len(offsets) == 1:
        return float(costs[0].min())
    cross = offsets[0] @ gram[:4, 4:] @ offsets[1].T
    return float((costs[0][:, None] + costs[1][None, :] + 2 * cross).min())


def error_of(difference: Array, gram: Array) -> Array:
    """(w' - w) H (w' - w) of each row [out, in]: equation 1, written as a quadratic form."""
    errors: Array = np.einsum("oi,ij,oj->o", difference, gram, difference)
    return errors


def correlated(inputs: int, seed: int, strength: float = 0.8) -> torch.Tensor:
    """X X^T / tokens, float32, of inputs with common causes, and of unequal size."""
    generator = torch.Generator().manual_seed(seed)
    tokens = 8 * inputs
    own = torch.randn(inputs, tokens, generator=generator)
    causes = torch.randn(inputs, max(1, inputs // 4), generator=generator) / (inputs // 4) ** 0.5
    common = causes @ torch.randn(causes.shape[1], tokens, generator=generator)
    sizes = torch.rand(inputs, 1, generator=generator) * 1.5 + 0.25
    x = sizes * ((1 - strength) * own + strength * common)
    gram: torch.Tensor = x @ x.T / tokens
    return gram


def problem(
    outputs: int, inputs: int, seed: int, gram: torch.Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Problem:
    """A random layer and a fine-tune nearby, both of checkpoints in `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(outputs, inputs, generator=generator) * 0.05
    tuned = base + torch.randn(outputs, inputs, generator=generator) * 0.004
    base, tuned = base.to(dtype).float(), tuned.to(dtype).float()
    seen = correlated(inputs, seed + 1) if gram is None else gram
    return Problem("model.layers.0.mlp.up_proj", base, tuned, Inputs(seen, 8 * inputs))
