"""The two factors of a delta in codes, each rounding error made up for by what is not rounded yet (GPTQ).

GPTQ (Frantar et al., 2023) rounds column after column of a matrix and adds to the columns left what keeps
the outputs: with the Hessian H of their inputs and H^-1 = T^T T, T upper triangular, column j's error divided
by T[j, j] is spread by row j of T. V's rows share H = X X^T (DeltaMix, equation 4); U's rows share
V^ X X^T V^^T (equation 6), and U's columns are the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workers.compression.grids import Grid, range_grid, search_grid
from workers.deltas.svd import GROUP, FactorCode, pack_bits

HALF_BITS = 16
_RIDGE = 1e-7  # keeps factors of ranks that quantisation made alike invertible


@dataclass(frozen=True)
class Codes:
    """Rows [rows, n] as format svd_delta has them: `codes` uint8, `scales` and `zeros` float32 [rows,
    ceil(n / 128)], and the `values` that they mean, float32 [rows, n]."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    values: torch.Tensor

    def stored(self, bits: int) -> FactorCode:
        """All rows as stored at one width."""
        if bits == HALF_BITS:
            return FactorCode(self.values.half().contiguous(), None, None)
        return FactorCode(pack_bits(self.codes, bits), self.scales.half(), self.zeros.to(torch.uint8))

    def pick(self, rows: torch.Tensor) -> Codes:
        """Some rows, in the order of their numbers."""
        return Codes(self.codes[rows], self.scales[rows], self.zeros[rows], self.values[rows])

    @classmethod
    def stacked(cls, several: Sequence[Codes]) -> Codes:
        """The rows of all, one after the other."""
        parts = ((c.codes, c.scales, c.zeros, c.values) for c in several)
        return cls(*(torch.cat(same) for same in zip(*parts, strict=True)))


def error_feedback(gram: torch.Tensor) -> torch.Tensor:
    """T, upper triangular with T^T T = gram^-1, float32 [n, n]. `gram` must be positive definite.

    The Cholesky factor of the matrix read backwards, read backwards itself, is R with R R^T = gram; T = R^-1.
    """
    lower = torch.linalg.cholesky(gram.double().flip(0, 1))
    one = torch.eye(len(gram), dtype=lower.dtype, device=gram.device)
    return torch.linalg.solve_triangular(lower, one, upper=False).flip(0, 1).float().contiguous()


def quantize_rows(
    rows: torch.Tensor, bits: torch.Tensor, feedback: torch.Tensor, *, search: bool = True
) -> Codes:
    """Rows [rows, n] of `bits` [rows] each, none of 16, with errors fed back along n by `feedback` [n, n].

    `search` picks each grid by its error (`search_grid`), else it spans the values' range.
    """
    work, n = rows.clone(), rows.shape[1]
    codes, values = torch.empty_like(rows, dtype=torch.uint8), torch.empty_like(rows)
    tops = (2.0**bits - 1).unsqueeze(1)
    grids = []
    for start in range(0, n, GROUP):
        block = slice(start, min(start + GROUP, n))
        local, held = feedback[block, block], work[:, block].contiguous()
        grid = _grid(held, tops, local.diagonal() ** -2, search)
        grids.append(grid)
        errors = torch.empty_like(held)
        for j in range(held.shape[1]):
            column = held[:, j : j + 1]
            code = grid.codes(column)
            errors[:, j : j + 1] = (column - grid.decode(code)) / local[j, j]
            codes[:, start + j : start + j + 1] = code
            held[:, j + 1 :].addmm_(errors[:, j : j + 1], local[j : j + 1, j + 1 :], alpha=-1)
        values[:, block] = grid.decode(codes[:, block].float())
        work[:, block.stop :].addmm_(errors, feedback[block, block.stop :], alpha=-1)
    return Codes(codes, *(torch.cat(parts, dim=1) for parts in _of(grids)), values)


def quantize_columns(
    target: torch.Tensor, bits: Sequence[int], hessian: torch.Tensor, *, search: bool = True
) -> Codes:
    """U [out, ranks] with a width for each column, as rows of U^T [ranks, out].

    Errors go to columns not yet rounded by the ranks' Hessian [ranks, ranks] of equation 6. Columns of few
    bits come first: the largest errors have most columns left to make up for them. Raises ValueError for
    values beyond float16.
    """
    _require_half(target)
    order = sorted(range(len(bits)), key=lambda rank: bits[rank])
    at = torch.tensor(order, device=target.device)
    feedback = error_feedback(_regular(hessian)[at][:, at])
    work = target.T[at].contiguous()
    coded = [_round_next(work, feedback, j, bits[rank], search) for j, rank in enumerate(order)]
    back = at.argsort()
    return Codes(*(torch.stack(parts)[back] for parts in zip(*coded, strict=True)))


def reconstruction_target(delta: torch.Tensor, v: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """Equation 7: the U~ [out, ranks] of least |delta X - U~ V^ X|_F, for V^ [ranks, in] as it is stored.

    U~ = delta H V^^T (V^ H V^^T)^-1 with H = X X^T, the diagonal matrix of singular values within U~.
    """
    wide, h = v.double(), gram.double()
    hessian = _regular(wide @ h @ wide.T)
    right = wide @ (h @ delta.double().T)
    return torch.cholesky_solve(right, torch.linalg.cholesky(hessian)).T.float()


def rank_hessian(v: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """V^ X X^T V^^T of equation 6, float64 [ranks, ranks]."""
    wide = v.double()
    return wide @ gram.double() @ wide.T


def halves(rows: torch.Tensor) -> Codes:
    """Rows of 16 bits: float16 and no grids."""
    _require_half(rows)
    none = torch.zeros((len(rows), -(-rows.shape[1] // GROUP)), device=rows.device)
    return Codes(torch.zeros_like(rows, dtype=torch.uint8), none, none, rows.half().float())


def _round_next(
    work: torch.Tensor, feedback: torch.Tensor, j: int, bits: int, search: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round row j of `work` [ranks, out], and feed its error to the rows after it: its codes, scales, zeros
    and values."""
    row = work[j]
    if bits == HALF_BITS:
        coded = halves(row.unsqueeze(0))
        parts = (coded.codes[0], coded.scales[0], coded.zeros[0], coded.values[0])
    else:
        grouped = torch.nn.functional.pad(row, (0, -len(row) % GROUP)).view(-1, GROUP)
        tops = torch.full((1, 1), 2.0**bits - 1, device=row.device)
        grid = _grid(grouped, tops, torch.ones(GROUP, device=row.device), search)
        codes = grid.codes(grouped)
        values = grid.decode(codes).flatten()[: len(row)]
        parts = (codes.flatten()[: len(row)].byte(), grid.scales[:, 0], grid.zeros[:, 0], values)
    work[j + 1 :].addr_(feedback[j, j + 1 :], (row - parts[3]) / feedback[j, j], alpha=-1)
    return parts


def _grid(values: torch.Tensor, tops: torch.Tensor, weights: torch.Tensor, search: bool) -> Grid:
    return search_grid(values, tops, weights) if search else range_grid(values, tops)


def _of(grids: Sequence[Grid]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [grid.scales for grid in grids], [grid.zeros for grid in grids]


def _regular(hessian: torch.Tensor) -> torch.Tensor:
    """Positive definite: a little more on the diagonal, and 1 for ranks whose rows are all 0."""
    diagonal = hessian.diagonal()
    return hessian + torch.diag(torch.where(diagonal > 0, diagonal * _RIDGE, 1.0))


def _require_half(values: torch.Tensor) -> None:
    largest = float(values.abs().max()) if values.numel() else 0.0
    if not largest <= torch.finfo(torch.float16).max:
        raise ValueError(
            f"expected singular vectors within float16, got {largest:g}; the difference is too "
            "large for a delta"
        )
