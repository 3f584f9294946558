"""The rotation of a BOFT layer (Liu et al., ICLR 2024), by PEFT's formulas, in float64.

S = (R - R^T) / 2; Q = (I - S)(I + S)^-1; B_i = P_i blockdiag(Q_i) P_i^T; Rot = B_{m-1} ... B_0, and
y = ((x Rot) W^T) * s + bias, so the merged weight is diag(s) W Rot^T. With P_i[j, p(j)] = 1,
W B_i^T = (W[:, p^-1] blockdiag(Q_i)^T)[:, p]: no dense n x n matrix is ever made.
"""

from __future__ import annotations

import torch


def permutation(n: int, block_size: int, factor: int) -> torch.Tensor:
    """p of P_i, int64 [n]: in each run of 2^i blocks the even half-blocks first, then the odd ones.

    n=16, block_size=4, i=1: 0 1 4 5 2 3 6 7 ... ; the identity for i=0.
    """
    if factor == 0:
        return torch.arange(n)
    halves = torch.arange(n).view(-1, 2**factor, 2, block_size // 2)  # [runs, pairs, parity, half]
    return halves.transpose(1, 2).reshape(n)


def cayley(r: torch.Tensor) -> torch.Tensor:
    """Orthogonal float64 matrices [..., b, b] from any [..., b, b]."""
    skew = (r.double() - r.double().mT) / 2
    identity = torch.eye(r.shape[-1], dtype=torch.float64, device=r.device)
    q: torch.Tensor = torch.linalg.solve(identity + skew, identity - skew, left=False)
    return q


def rotate_weight(weight: torch.Tensor, r: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """diag(s) W Rot^T, float64 [out, in], for W [out, in], R [m, in/b, b, b] and s [out, 1]."""
    factors, blocks, size, _ = r.shape
    rotated = weight.double()
    for factor in range(factors):
        p = permutation(blocks * size, size, factor).to(weight.device)
        columns = rotated[:, p.argsort()].reshape(-1, blocks, size)
        rotated = torch.einsum("oki,kji->okj", columns, cayley(r[factor])).flatten(1)[:, p]
    return rotated * s.double()
