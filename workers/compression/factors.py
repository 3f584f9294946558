"""The two factors of a delta in codes; columns not yet rounded compensate each rounding error (GPTQ).

GPTQ (Frantar et al., 2023) rounds column after column of a matrix and changes the remaining columns so that
the outputs stay. H is the Hessian of their inputs, and H^-1 = T^T T with T upper triangular. Row j of T
spreads column j's error divided by T[j, j]. V's rows share H = X X^T (DeltaMix, equation 4). U's rows share
V^ X X^T V^^T (equation 6), and U's columns are the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from workers.compression.definite import lower_factor
from workers.compression.grids import Grid, range_grid, search_grid
from workers.deltas.svd import GROUP, FactorCode, pack_bits

HALF_BITS = 16
_RANKS = 32  # of U: their grids are chosen before the first of them is rounded
_GROUPS_TRIED = 16
_RIDGE = 1e-7  # keeps factors invertible if quantisation made ranks equal


@dataclass(frozen=True)
class Codes:
    """Rows [rows, n] as in format svd_delta.

    `codes` uint8, `scales` and `zeros` float32 [rows, ceil(n / 128)], and the decoded `values`, float32
    [rows, n].
    """

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
        """The rows of several, one after the other."""
        return cls(
            torch.cat([c.codes for c in several]),
            torch.cat([c.scales for c in several]),
            torch.cat([c.zeros for c in several]),
            torch.cat([c.values for c in several]),
        )


def error_feedback(gram: torch.Tensor) -> torch.Tensor:
    """T, upper triangular with T^T T = gram^-1, float32 [n, n]. `gram` must be positive definite.

    Reverse the matrix, take its Cholesky factor, and reverse that: the result is R with R R^T = gram; T =
    R^-1.
    """
    lower = lower_factor(gram.double().flip(0, 1))
    one = torch.eye(len(gram), dtype=lower.dtype, device=gram.device)
    inverse: torch.Tensor = torch.linalg.solve_triangular(lower, one, upper=False)
    return inverse.flip(0, 1).float().contiguous()


def quantize_rows(
    rows: torch.Tensor, bits: torch.Tensor, feedback: torch.Tensor, *, search: bool = True
) -> Codes:
    """Quantise rows [rows, n] to `bits` [rows] each, with errors fed back along n by `feedback` [n, n].

    `search` chooses each grid by its error (`search_grid`), else it spans the values' range.
    """
    half = bits == HALF_BITS
    if bool(half.any()):
        back = torch.cat([half.nonzero(), (~half).nonzero()]).flatten().argsort()
        coded = quantize_rows(rows[~half], bits[~half], feedback, search=search)
        return Codes.stacked([halves(rows[half]), coded]).pick(back)
    work, n = rows.T.contiguous(), rows.shape[1]
    codes = torch.empty_like(work, dtype=torch.uint8)
    tops = (2.0**bits - 1).unsqueeze(1)
    grids = []
    for start in range(0, n, GROUP):
        block = slice(start, min(start + GROUP, n))
        local = feedback[block, block]
        grid = _grid(work[block].T.contiguous(), tops, local.diagonal() ** -2, search)
        codes[block], errors = _round_block(work[block], grid.scales.T, grid.zeros.T, tops.T, local)
        work[block.stop :].addmm_(feedback[block, block.stop :].T, errors, alpha=-1)
        grids.append(grid)
    scales, zeros = (
        torch.cat(parts, dim=1) for parts in ([g.scales for g in grids], [g.zeros for g in grids])
    )
    return _decoded(codes.T.contiguous(), scales, zeros)


def nearest_loss(rows: torch.Tensor, bits: int, *, search: bool = True) -> torch.Tensor:
    """The share of a row's energy that rounding to nearest loses, float32 [rows] for [rows, n].

    Only some of the row's groups of 128 are used.
    """
    if bits == HALF_BITS:
        return torch.zeros_like(rows[:, 0])
    tops = torch.full((1, 1), 2.0**bits - 1, device=rows.device)
    groups = rows.split(GROUP, dim=1)
    lost, seen = torch.zeros_like(rows[:, 0]), torch.zeros_like(rows[:, 0])
    for group in groups[:: -(-len(groups) // _GROUPS_TRIED)]:
        alike = torch.ones(group.shape[1], device=rows.device)
        lost += (_grid(group, tops, alike, search).nearest(group) - group).square().sum(dim=1)
        seen += group.square().sum(dim=1)
    return torch.where(seen > 0, lost / seen, 0.0)


def quantize_columns(
    target: torch.Tensor, bits: Sequence[int], hessian: torch.Tensor, *, search: bool = True
) -> Codes:
    """U [out, ranks] with a width for each column, as rows of U^T [ranks, out].

    Errors are fed to later columns by the ranks' Hessian [ranks, ranks] of equation 6; columns of equal width
    must be adjacent. Raises ValueError for values beyond float16.
    """
    _require_half(target)
    feedback, work, coded = error_feedback(_regular(hessian)), target.T.contiguous(), []
    for block in _blocks(bits):
        if bits[block.start] == HALF_BITS:  # its error is not worth compensating
            coded.append(halves(work[block]))
            continue
        local = feedback[block, block]
        codes, errors = _round_ranks(work[block], 2.0 ** bits[block.start] - 1, local, search)
        work[block.stop :].addmm_(feedback[block, block.stop :].T, errors, alpha=-1)
        coded.append(codes)
    return Codes.stacked(coded)


def reconstruction_target(delta: torch.Tensor, v: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """Equation 7: the U~ [out, ranks] with the least |delta X - U~ V^ X|_F, for the stored V^ [ranks, in].

    U~ = delta H V^^T (V^ H V^^T)^-1 with H = X X^T; U~ includes the diagonal matrix of singular values.
    """
    wide, h = v.double(), gram.double()
    hessian = _regular(wide @ h @ wide.T)
    right = wide @ (h @ delta.double().T)
    return torch.cholesky_solve(right, lower_factor(hessian)).T.float()


def refit_rows(delta: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The V~ [ranks, in] with the least |delta X - U^ V~ X|_F for all inputs, for the stored U^T [ranks,
    out].

    The other half of equation 7: V~ = (U^^T U^)^-1 U^^T delta.
    """
    wide = u.double()
    factor = lower_factor(_regular(wide @ wide.T))
    return torch.cholesky_solve(wide @ delta.double(), factor).float()


def rank_hessian(v: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """V^ X X^T V^^T of equation 6, float64 [ranks, ranks]."""
    wide = v.double()
    return wide @ gram.double() @ wide.T


def halves(rows: torch.Tensor) -> Codes:
    """Rows of 16 bits: float16 without grids."""
    _require_half(rows)
    none = torch.zeros((len(rows), -(-rows.shape[1] // GROUP)), device=rows.device)
    return Codes(torch.zeros_like(rows, dtype=torch.uint8), none, none, rows.half().float())


def _blocks(bits: Sequence[int]) -> Iterator[slice]:
    """Consecutive ranks of one width, at most _RANKS at once."""
    start = 0
    for stop in range(1, len(bits) + 1):
        if stop == len(bits) or bits[stop] != bits[start] or stop - start == _RANKS:
            yield slice(start, stop)
            start = stop


def _round_ranks(
    rows: torch.Tensor, top: float, local: torch.Tensor, search: bool
) -> tuple[Codes, torch.Tensor]:
    """`_round_block` for U^T's rows [ranks, out] of one width, with a grid for each 128 values of each
    row.
    """
    out = rows.shape[1]
    grouped = torch.nn.functional.pad(rows, (0, -out % GROUP)).view(len(rows), -1, GROUP)
    tops = torch.full((1, 1, 1), top, device=rows.device)
    grid = _grid(grouped, tops, torch.ones(GROUP, device=rows.device), search)
    scales, zeros = grid.scales.squeeze(2), grid.zeros.squeeze(2)
    each = [t.repeat_interleave(GROUP, dim=1)[:, :out] for t in (scales, zeros)]
    codes, errors = _round_block(rows, each[0], each[1], tops[0], local)
    return _decoded(codes, scales, zeros), errors


def _round_block(
    rows: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, tops: torch.Tensor, local: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round row after row of [k, n]; T [k, k] spreads each error over the rows after it.

    The grid's tensors broadcast with [k, n]. Returns codes uint8 [k, n] and the errors divided by T's
    diagonal, with which the caller corrects rows beyond the block.
    """
    shifted = rows + zeros * scales  # so that codes begin at 0
    scales, tops = scales.expand_as(rows), tops.expand_as(rows)
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    spread = local / local.diagonal()[:, None]
    codes, errors, least = torch.empty_like(rows), torch.empty_like(rows), torch.zeros_like(rows[0])
    each = zip(*(t.unbind() for t in (shifted, inverse, scales, tops, spread, codes, errors)), strict=True)
    for j, (row, over, scale, top, onto, code, error) in enumerate(each, start=1):
        torch.clamp(torch.mul(row, over).round_(), least, top, out=code)
        torch.addcmul(row, code, scale, value=-1, out=error)
        shifted[j:].addr_(onto[j:], error, alpha=-1)
    return codes.to(torch.uint8), errors / local.diagonal()[:, None]


def _decoded(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Codes:
    """Codes [rows, n] with their decoded values."""
    n = codes.shape[1]
    wide = [t.repeat_interleave(GROUP, dim=1)[:, :n] for t in (scales, zeros)]
    return Codes(codes, scales, zeros, (codes.float() - wide[1]) * wide[0])


def _grid(values: torch.Tensor, tops: torch.Tensor, weights: torch.Tensor, search: bool) -> Grid:
    return search_grid(values, tops, weights) if search else range_grid(values, tops)


def _regular(hessian: torch.Tensor) -> torch.Tensor:
    """The Hessian made positive definite: a little more on the diagonal, and 1 for ranks whose rows are all
    0.
    """
    diagonal = hessian.diagonal()
    return hessian + torch.diag(torch.where(diagonal > 0, diagonal * _RIDGE, 1.0))


def _require_half(values: torch.Tensor) -> None:
    largest = float(values.abs().max()) if values.numel() else 0.0
    if not largest <= torch.finfo(torch.float16).max:
        raise ValueError(
            f"expected singular vectors within float16, got {largest:g}; the difference is too "
            "large for a delta"
        )
