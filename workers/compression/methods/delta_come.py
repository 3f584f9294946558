"""Delta-CoMe (Ping et al., 2024): singular vectors of 8, 3 and 2 bits by their order, rounded with GPTQ."""

from __future__ import annotations

import torch

from profiler.variants.types import SVD_GROUP, VariantKind
from workers.compression.factors import error_feedback, quantize_columns, quantize_rows, rank_hessian
from workers.compression.program import budget_bits, rank_bits
from workers.compression.singular import (
    compressed,
    damped,
    group_codes,
    require_finite,
    singular_factors,
)
from workers.compression.types import Compressed, Method, Problem
from workers.deltas.svd import DELTA_COME, REST_BITS

_DAMPING = 0.01  # of the mean diagonal, as in GPTQ


def delta_come(ratio: float = 1 / 16, *, codes_only: bool = False) -> Method:
    """8 bits for 2 ranks, 3 for the next 32, 2 for the ranks that fit into the rest of `ratio`.

    `ratio` is the share of the matrix in 16 bits. The budget counts all stored bytes; `codes_only` leaves out
    scales and zeros, as the paper does, and stores about 9% more. Raises ValueError for a ratio that is not
    in 0..1.
    """
    budget_bits((1, 1), ratio)

    def step(problem: Problem) -> Compressed:
        require_finite(problem)
        out, into = problem.base.shape
        bits = widths((out, into), ratio, codes_only=codes_only)
        gram = damped(problem.gram, _DAMPING)
        alike = torch.eye(into, device=gram.device)
        factors = singular_factors(problem.delta, alike, len(bits), whiten=False)
        bits = bits[: len(factors.s)]
        v = quantize_rows(
            factors.v, torch.tensor(bits, device=gram.device), error_feedback(gram), search=False
        )
        hessian = rank_hessian(v.values, gram)
        u = quantize_columns(factors.u * factors.s, bits, hessian, search=False)
        return compressed(problem, group_codes(v, u, bits))

    facts, options = {"group_size": SVD_GROUP}, {"ratio": ratio, "codes_only": codes_only}
    return Method("delta-come", VariantKind.SVD_DELTA, True, step, facts, options)


def widths(shape: tuple[int, int], ratio: float, *, codes_only: bool = False) -> list[int]:
    """The bits of each rank of a matrix [out, in]. Raises ValueError if not one rank fits."""
    left, chosen = budget_bits(shape, ratio), list[int]()
    for bits, wanted in (*DELTA_COME, (REST_BITS, min(shape))):
        cost = rank_bits(shape, bits, codes_only=codes_only)
        count = min(wanted, left // cost, min(shape) - len(chosen))
        chosen += [bits] * count
        left -= count * cost
    if not chosen:
        raise ValueError(
            f"a ratio of {ratio:g} leaves no rank for a matrix of {shape[0]} x {shape[1]}; raise it"
        )
    return chosen
