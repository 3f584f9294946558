"""Layers as after fine-tuning: singular values that fall by a power law, and correlated inputs."""

from __future__ import annotations

import torch

from workers.compression.types import Inputs, Problem


def inputs(into: int, seed: int, tokens: int | None = None) -> Inputs:
    """Correlated inputs, a few of them much larger than the others; full rank unless `tokens` are few."""
    random = torch.Generator().manual_seed(seed)
    tokens = tokens or 4 * into
    mixing = torch.linalg.qr(torch.randn(into, into, generator=random)).Q
    scales = (1 + torch.arange(into)) ** -0.5
    x = mixing @ (scales[:, None] * torch.randn(into, tokens, generator=random))
    x[torch.randperm(into, generator=random)[: max(1, into // 32)]] *= 5
    return Inputs(x @ x.T / tokens, tokens)


def problem(shape: tuple[int, int], seed: int, rank: int | None = None, power: float = 0.7) -> Problem:
    """A delta [out, in] with singular values (1 + i)^-power; only `rank` of them where given."""
    out, into = shape
    random = torch.Generator().manual_seed(1000 + seed)
    rank = rank or min(shape)
    u = torch.linalg.qr(torch.randn(out, rank, generator=random)).Q
    v = torch.linalg.qr(torch.randn(into, rank, generator=random)).Q
    s = 0.3 * (1 + torch.arange(rank)) ** -power
    base = torch.randn(out, into, generator=random) / into**0.5
    return Problem("model.layers.0.mlp.up_proj", base, base + (u * s) @ v.T, inputs(into, seed))
