"""DeltaMix: singular vectors of mixed precision, allotted by the remaining error (algorithm 1).

1. U diag(s) V = delta.
2. Round each row of V at each candidate width, and measure the error of its outputs (equations 4 and 5).
3. The program of equation 8 chooses the widths, exactly.
4. V^ is V at those widths: rows are independent of one another, so step 2 has it already.
5. Correct U for V's errors (equation 7), and round it with the same widths (equation 6).
6. Not in the paper: repeat V, for the current U, and then U (`sweeps`); keep them if the layer's error falls.

Less error over calibration's inputs does not mean better answers. With all options of `Settings` that the
paper does not have, and its damping of 0.01, the error falls by a third. But a fine-tune that kept 54% of its
facts then keeps 33% (benchmarks/results/compression.md). So the defaults leave these options off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from profiler.variants.types import SVD_GROUP, VariantKind
from workers.compression.allocation import allocate
from workers.compression.factors import (
    Codes,
    error_feedback,
    nearest_loss,
    quantize_columns,
    quantize_rows,
    rank_hessian,
    reconstruction_target,
    refit_rows,
)
from workers.compression.program import BitProgram, budget_bits, most_ranks, rank_bits
from workers.compression.singular import (
    Factors,
    compressed,
    damped,
    group_codes,
    require_finite,
    singular_factors,
)
from workers.compression.types import Compressed, Method, Problem
from workers.deltas.svd import BITS

DROPPED = 0
WIDTHS = tuple(sorted(BITS))


@dataclass(frozen=True)
class Settings:
    """The settings of DeltaMix for a matrix.

    `ratio` is the share of the matrix in 16 bits. `widths` are the candidates in addition to 0; at most
    `max_widths` of them are used. `correct_target` is the reconstruction target correction. `damping` is the
    weight of inputs that calibration missed, as a share of the inputs' mean square. `codes_only` counts only
    codes against the budget, not scales and zeros, as the paper does.

    The other four are not in the paper. `whiten` uses the singular vectors of the delta's outputs instead of
    the delta's. `search` finds the best grids instead of spanning all values. `count_u` adds the loss of
    rounding a rank's column of U to the rank's error. `sweeps` is the number of times that step 6 is done. A
    sweep corrects the target, too.
    """

    ratio: float = 1 / 16
    max_widths: int = 4
    widths: tuple[int, ...] = WIDTHS
    correct_target: bool = True
    whiten: bool = False
    search: bool = False
    count_u: bool = False
    sweeps: int = 0
    codes_only: bool = False
    damping: float = 0.1

    def __post_init__(self) -> None:
        budget_bits((1, 1), self.ratio)
        if not self.widths or not set(self.widths) <= set(BITS):
            raise ValueError(
                f"expected widths among {', '.join(map(str, WIDTHS))}, got {self.widths}; "
                "engines read no others"
            )
        if not self.damping > 0:
            raise ValueError(f"expected a damping above 0, got {self.damping:g}; 0.01 is GPTQ's")
        if self.max_widths < 1 or self.sweeps < 0:
            raise ValueError(
                f"expected max_widths of at least 1 and sweeps of at least 0, got {self.max_widths} and "
                f"{self.sweeps}"
            )

    def cost(self, shape: tuple[int, int], bits: int) -> int:
        return rank_bits(shape, bits, codes_only=self.codes_only)


AS_PUBLISHED = Settings(codes_only=True, damping=0.01)
"""The paper's choices."""


def deltamix(ratio: float = 1 / 16, max_widths: int = 4) -> Method:
    """DeltaMix to `ratio` of the matrix in 16 bits, all stored bytes counted, with up to `max_widths` widths.

    Raises ValueError for a ratio that is not in 0..1 and for max_widths below 1.
    """
    return deltamix_with(Settings(ratio, max_widths))


def deltamix_with(settings: Settings) -> Method:
    """DeltaMix with all settings."""

    def step(problem: Problem) -> Compressed:
        require_finite(problem)
        out, into = problem.base.shape
        shape, budget = (out, into), budget_bits((out, into), settings.ratio)
        most = most_ranks(shape, settings.widths, budget, codes_only=settings.codes_only)
        gram = damped(problem.gram, settings.damping)
        feedback = error_feedback(gram)
        factors = singular_factors(problem.delta, gram, most, whiten=settings.whiten)
        tried = simulate(factors.v, settings.widths, feedback, search=settings.search)
        errors = rank_errors(factors, tried, gram)
        if settings.count_u:
            lost = column_errors(factors, settings.widths, search=settings.search)
            errors = {width: found + lost[width] for width, found in errors.items()}
        bits = allot(errors, shape, budget, settings)
        kept = sorted((rank for rank, width in enumerate(bits) if width != DROPPED), key=lambda r: -bits[r])
        layer = _Layer(problem.delta, gram, feedback, [bits[rank] for rank in kept], settings)
        v, u = layer.coded(factors, _chosen(tried, kept, bits), kept)
        return compressed(problem, group_codes(v, u, layer.widths))

    return Method("deltamix", VariantKind.SVD_DELTA, True, step, {"group_size": SVD_GROUP}, asdict(settings))


def simulate(
    v: torch.Tensor, widths: Sequence[int], feedback: torch.Tensor, *, search: bool = True
) -> dict[int, Codes]:
    """V [ranks, in] rounded at each width, all at once."""
    bits = torch.tensor(widths, device=v.device).repeat_interleave(len(v))
    together = quantize_rows(v.repeat(len(widths), 1), bits, feedback, search=search)
    rows = torch.arange(len(v), device=v.device)
    return {width: together.pick(rows + place * len(v)) for place, width in enumerate(widths)}


def rank_errors(factors: Factors, tried: dict[int, Codes], gram: torch.Tensor) -> dict[int, torch.Tensor]:
    """Equation 5 for each width, and 0 for a dropped rank: s_i^2 dV_i X X^T dV_i^T, float32 [ranks]."""
    found = {DROPPED: factors.energy}
    for width, codes in tried.items():
        lost = codes.values - factors.v
        found[width] = factors.s.square() * ((lost @ gram) * lost).sum(dim=1).clamp_min(0)
    return found


def column_errors(factors: Factors, widths: Sequence[int], *, search: bool = True) -> dict[int, torch.Tensor]:
    """The approximate error that rounding U's columns adds, before any feedback, float32 [ranks].

    The rows of V are orthogonal in the outputs, so an error of |dU_i|^2 in column i costs that share of the
    rank's energy. 0 for a dropped rank: equation 5 has its energy already.
    """
    columns = factors.u.T.contiguous()
    found = {DROPPED: torch.zeros_like(factors.energy)}
    for width in widths:
        found[width] = factors.energy * nearest_loss(columns, width, search=search)
    return found


def allot(
    errors: dict[int, torch.Tensor], shape: tuple[int, int], budget: int, settings: Settings
) -> list[int]:
    """Equation 8: the bits of each rank. If all were dropped, the first rank has the fewest bits."""
    widths = sorted(errors)
    table = torch.stack([errors[width] for width in widths], dim=1).double().cpu().numpy()
    costs = tuple(settings.cost(shape, width) for width in widths)
    choice = allocate(BitProgram(np.ascontiguousarray(table), costs, budget, settings.max_widths))
    bits = [widths[column] for column in choice.tolist()]
    if not any(bits):
        bits[0] = min(settings.widths)
    return bits


@dataclass(frozen=True)
class _Layer:
    """Steps 5 and 6: the delta [out, in], its inputs, and the widths of the kept ranks, the widest first."""

    delta: torch.Tensor
    gram: torch.Tensor
    feedback: torch.Tensor
    widths: list[int]
    settings: Settings

    def coded(self, factors: Factors, v: Codes, kept: Sequence[int]) -> tuple[Codes, Codes]:
        """V^ as given, or an improved one, and U^T."""
        search = self.settings.search
        u = self._u(v, (factors.u * factors.s)[:, kept])
        best = self._error(v, u) if self.settings.sweeps else 0.0
        bits = torch.tensor(self.widths, device=self.delta.device)
        for _ in range(self.settings.sweeps):
            again = refit_rows(self.delta, u.values)
            v_again = quantize_rows(again, bits, self.feedback, search=search)
            u_again = self._u(v_again, u.values.T)
            error = self._error(v_again, u_again)
            if error >= best:
                break
            v, u, best = v_again, u_again, error
        return v, u

    def _u(self, v: Codes, uncorrected: torch.Tensor) -> Codes:
        """U of equation 6 in codes, with the target of equation 7 if correction is on."""
        target = uncorrected
        if self.settings.correct_target:
            target = reconstruction_target(self.delta, v.values, self.gram)
        hessian = rank_hessian(v.values, self.gram)
        return quantize_columns(target, self.widths, hessian, search=self.settings.search)

    def _error(self, v: Codes, u: Codes) -> float:
        """Equation 1."""
        left = self.delta - u.values.T @ v.values
        return float(((left @ self.gram) * left).sum())


def _chosen(tried: dict[int, Codes], kept: Sequence[int], bits: Sequence[int]) -> Codes:
    """V^: each kept rank at its width."""
    used = sorted(tried)
    start = {width: place * len(bits) for place, width in enumerate(used)}
    together = Codes.stacked([tried[width] for width in used])
    rows = [start[bits[rank]] + rank for rank in kept]
    return together.pick(torch.tensor(rows, device=together.values.device))
