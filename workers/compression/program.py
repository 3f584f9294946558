"""Equation 8 of DeltaMix: how many bits each singular vector gets, as a 0/1 program.

    min   sum_ik E[i, k] S[i, k]
    s.t.  sum_ik B[k] S[i, k] <= budget     (the available bits)
          sum_k S[i, k] = 1                 (each rank has one width)
          S[i, k] <= f[k]                   (a width is used only if it is chosen)
          sum_k f[k] <= max_widths          (over widths that cost bits: a dropped rank has no width)

`allocation.py` solves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from workers.deltas.svd import GROUP

Floats: TypeAlias = npt.NDArray[np.float64]
Choice: TypeAlias = npt.NDArray[np.int64]

_SCALE_AND_ZERO_BITS = 16 + 8
_HALF_BITS = 16


@dataclass(frozen=True, eq=False)
class BitProgram:
    """One matrix's program.

    `errors` [ranks, widths] are E, at least 0. `bits_per_rank` [widths] are B: the stored bits of one rank of
    a width, at least 0, the same for all ranks. One width must cost nothing (the rank is dropped).
    `max_widths` is the largest number of other widths in use. Raises ValueError for shapes that do not fit
    and for invalid errors or costs.
    """

    errors: Floats
    bits_per_rank: tuple[int, ...]
    budget_bits: int
    max_widths: int

    def __post_init__(self) -> None:
        if self.errors.ndim != 2 or self.errors.shape[1] != len(self.bits_per_rank):
            raise ValueError(
                f"expected errors of shape [ranks, {len(self.bits_per_rank)}], one column for each width, "
                f"got {list(self.errors.shape)}"
            )
        if not np.isfinite(self.errors).all() or (self.errors < 0).any():
            raise ValueError("expected finite errors of at least 0, got others; check weights and inputs")
        if min(self.bits_per_rank, default=1) != 0:
            raise ValueError(f"expected a width that costs nothing, got {self.bits_per_rank}; add 0 bits")
        if self.budget_bits < 0 or self.max_widths < 1:
            raise ValueError(
                f"expected a budget of at least 0 bits and at least one width, got {self.budget_bits} and "
                f"{self.max_widths}"
            )

    @property
    def coded(self) -> tuple[int, ...]:
        """The widths that cost bits, by their column."""
        return tuple(k for k, bits in enumerate(self.bits_per_rank) if bits > 0)

    @property
    def dropped(self) -> tuple[int, ...]:
        """The widths that cost nothing."""
        return tuple(k for k, bits in enumerate(self.bits_per_rank) if bits == 0)

    def error(self, choice: Choice) -> float:
        """The objective of a choice of one width for each rank, [ranks]."""
        return float(self.errors[np.arange(len(choice)), choice].sum())

    def cost_bits(self, choice: Choice) -> int:
        return int(np.asarray(self.bits_per_rank, dtype=np.int64)[choice].sum())

    def allows(self, choice: Choice) -> bool:
        """Whether a choice meets all constraints."""
        used = set(choice.tolist()) & set(self.coded)
        return self.cost_bits(choice) <= self.budget_bits and len(used) <= self.max_widths


def rank_bits(shape: tuple[int, int], bits: int, *, codes_only: bool = False) -> int:
    """The bits of one rank of a matrix [out, in] in format svd_delta at a width of `bits`; 0 if dropped.

    A rank has a row of V and a column of U: codes in whole bytes of eight codes, and for each 128 a scale of
    16 and a zero of 8 bits. `codes_only` counts (h_in + h_out) * bits, as the paper's B does.
    """
    if codes_only or bits in {0, _HALF_BITS}:
        return sum(shape) * bits
    return sum(-(-n // 8) * 8 * bits + -(-n // GROUP) * _SCALE_AND_ZERO_BITS for n in shape)


def budget_bits(shape: tuple[int, int], ratio: float) -> int:
    """`ratio` of the matrix [out, in] in 16 bits. Raises ValueError for a ratio that is not in 0..1."""
    if not 0 < ratio <= 1:
        raise ValueError(f"expected a ratio above 0 and at most 1, such as 1/16, got {ratio:g}")
    return int(ratio * _HALF_BITS * shape[0] * shape[1])


def most_ranks(
    shape: tuple[int, int], widths: Sequence[int], budget: int, *, codes_only: bool = False
) -> int:
    """The ranks that fit the budget if all have the narrowest width. Raises ValueError if none fits."""
    narrowest = min(bits for bits in widths if bits > 0)
    ranks = min(budget // rank_bits(shape, narrowest, codes_only=codes_only), *shape)
    if ranks == 0:
        raise ValueError(
            f"a budget of {budget} bits leaves no rank of {narrowest} bits for a matrix of "
            f"{shape[0]} x {shape[1]}; raise the ratio"
        )
    return ranks
