"""The singular vectors that methods of format svd_delta code, and the result of such a method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workers.compression.definite import lower_factor
from workers.compression.factors import Codes
from workers.compression.types import Compressed, Encoded, Problem
from workers.deltas import svd
from workers.deltas.parts import svd_parts

_NOISE = 1e-9  # of the energy: float16 itself loses more


@dataclass(frozen=True)
class Factors:
    """delta ~ u diag(s) v, the most significant rank first.

    float32 u [out, ranks] with orthonormal columns, s [ranks], v [ranks, in] with rows of length 1. `energy`
    [ranks] is each rank's gain in equation 1.
    """

    u: torch.Tensor
    s: torch.Tensor
    v: torch.Tensor
    energy: torch.Tensor


def singular_factors(delta: torch.Tensor, gram: torch.Tensor, most: int, *, whiten: bool = True) -> Factors:
    """The `most` ranks of [out, in] that matter most in equation 1; fewer if fewer matter.

    Not whitened: singular vectors of delta, as in DeltaMix. Whitened: the singular vectors of delta H^(1/2)
    for H = X X^T, and V is the right ones times H^(-1/2). Then u diag(s) v has the least error in equation 1
    of all matrices of that rank (Eckart and Young). They come from the eigenvectors of the smaller of delta H
    delta^T and its counterpart, in float64. `gram` must be positive definite.
    """
    wide, h = delta.double(), gram.double()
    metric = h if whiten else None
    u, s, v = _left(wide, metric) if delta.shape[0] <= delta.shape[1] else _right(wide, metric)
    energy = s.square() * ((v @ h) * v).sum(dim=1)
    ordered, at = energy.sort(descending=True, stable=True)
    left = ordered.sum() - ordered.cumsum(dim=0)
    count = max(1, min(most, int((left > _NOISE * ordered.sum()).sum()) + 1))
    at = at[:count]
    u, s, v = u[:, at], s[at], v[at]
    lengths = v.norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
    return Factors(u.float(), (s * lengths).float(), (v / lengths[:, None]).float(), ordered[:count].float())


def damped(gram: torch.Tensor, share: float) -> torch.Tensor:
    """X X^T plus `share` of its mean diagonal, so that inputs which calibration missed count a little,
    too.
    """
    mean = float(gram.diagonal().mean())
    plus = share * mean if mean > 0 else 1.0
    found = gram.clone()
    found.diagonal().add_(plus)
    return found


def require_finite(problem: Problem) -> None:
    """Raises ValueError for NaN or infinity in weights or inputs."""
    for what, values in (("base", problem.base), ("fine-tune", problem.tuned), ("inputs", problem.gram)):
        if not bool(values.isfinite().all()):
            raise ValueError(
                f"expected finite numbers in the {what} of {problem.name}, got NaN or infinity; check the "
                "checkpoints" + (" and the calibration texts" if what == "inputs" else "")
            )


def compressed(problem: Problem, groups: Sequence[svd.GroupCode]) -> Compressed:
    """The decoded groups, with their parts and facts as docs/formats.md names them."""
    encoded = Encoded(*svd_parts(groups))
    out, into = problem.base.shape
    weight = problem.base + svd.decode(groups, (out, into))
    return Compressed(weight, encoded.size_bytes, encoded)


def group_codes(v: Codes, u: Codes, bits: Sequence[int]) -> tuple[svd.GroupCode, ...]:
    """Group ranks by width, the widest first; v [ranks, in] and u [ranks, out] have `bits` [ranks]."""
    groups = []
    for width in sorted(set(bits), reverse=True):
        ranks = [rank for rank, wanted in enumerate(bits) if wanted == width]
        at = torch.tensor(ranks, device=v.values.device)
        groups.append(svd.GroupCode(width, len(ranks), v.pick(at).stored(width), u.pick(at).stored(width)))
    return tuple(groups)


def _left(
    delta: torch.Tensor, metric: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Use delta H delta^T = U S^2 U^T; then V = S^-1 U^T delta."""
    weighted = delta if metric is None else delta @ metric
    values, u = torch.linalg.eigh(weighted @ delta.T)
    s = values.clamp_min(0).sqrt()
    return u, s, _divided(u.T @ delta, s.unsqueeze(1))


def _right(
    delta: torch.Tensor, metric: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Use L^T delta^T delta L = P S^2 P^T for H = L L^T; then U S = delta L P and V = P^T L^-1."""
    lower = None if metric is None else lower_factor(metric)
    whitened = delta if lower is None else delta @ lower
    values, p = torch.linalg.eigh(whitened.T @ whitened)
    s = values.clamp_min(0).sqrt()
    v = p.T.contiguous()
    if lower is not None:
        v = torch.linalg.solve_triangular(lower, v, upper=False, left=False)
    return _divided(whitened @ p, s), s, v


def _divided(vectors: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Vectors divided by their singular values; 0 for singular values that float64 cannot distinguish from
    0.
    """
    least = max(float(s.max()) * torch.finfo(s.dtype).eps ** 0.5, torch.finfo(s.dtype).tiny)
    return torch.where(s > least, vectors / s.clamp_min(least), 0.0)
