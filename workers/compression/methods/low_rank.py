"""Low rank: the truncated SVD of the delta in 16 bits (Ryu et al., 2023), a baseline of DeltaMix."""

from __future__ import annotations

import torch

from profiler.variants.types import SVD_GROUP, VariantKind
from workers.compression.factors import HALF_BITS, halves
from workers.compression.program import budget_bits, most_ranks
from workers.compression.singular import compressed, group_codes, require_finite, singular_factors
from workers.compression.types import Compressed, Method, Problem


def low_rank(ratio: float = 1 / 16) -> Method:
    """The most singular vectors that `ratio` of the matrix in 16 bits holds. Uncalibrated.

    Raises ValueError for a ratio that is not in 0..1.
    """
    budget_bits((1, 1), ratio)

    def step(problem: Problem) -> Compressed:
        require_finite(problem)
        out, into = problem.base.shape
        most = most_ranks((out, into), (HALF_BITS,), budget_bits((out, into), ratio))
        all_alike = torch.eye(into, device=problem.base.device)
        factors = singular_factors(problem.delta, all_alike, most, whiten=False)
        u = halves((factors.u * factors.s).T)
        return compressed(problem, group_codes(halves(factors.v), u, [HALF_BITS] * len(factors.s)))

    facts = {"group_size": SVD_GROUP}
    return Method("low-rank", VariantKind.SVD_DELTA, False, step, facts, {"ratio": ratio})
