"""The column loop of SparseGPT and GPTQ: prune and round a matrix column by column; later columns compensate.

It minimises |(W' - W) X|_F^2 for W [out, in] and inputs X [in, tokens]. H = 2 X X^T, damped, has the inverse
U^T U with U upper triangular. Once the columns before j are fixed, (U_jj)^2 is the inverse's diagonal element
for j. Row j of U over U_jj is how the later columns must answer an error in column j (SparseGPT, Frantar and
Alistarh 2023, algorithm 1; GPTQ, Frantar et al. 2022, algorithm 1). A factor on H does not change the result,
so `gram` may be X X^T, or X X^T / tokens.

Matrices are transposed here, [in, out], so that a column of weights is contiguous in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from workers.kernels.column_loop import FOUR, MAX_COLUMNS

DAMPINGS = (0.01, 0.1, 1.0)
"""Shares of the diagonal's mean to add to the diagonal (SparseGPT's `percdamp` is 0.01); the larger shares
are for matrices for which Cholesky fails."""

BLOCK = MAX_COLUMNS
"""Columns after which the columns behind are updated."""

Fix = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Choose from and round the first columns of some, and have those behind them answer, as
`column_loop.apply` does: given are `work`, `kept`, `errors`, `deviations` and `answers`."""

StartGroup = Callable[[torch.Tensor], Fix]
"""How to fix the columns of a group; given are their weights [group size, out] before the first one is
fixed, with all earlier columns' errors made up for."""


def eliminate(
    weights: torch.Tensor,
    gram: torch.Tensor,
    start_group: StartGroup,
    group_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounded weights [out, in] and the mask of kept weights, bool [out, in].

    `weights` [out, in] is float32 or float64, `gram` [in, in] symmetric. `group_size` None: one group. An
    input that was always 0 (a dead column) gets weight 0 before the choice among its four columns. Raises
    ValueError if `in` or the group size does not divide by 4, for values that are not finite, and if no
    damping makes the Hessian positive definite.
    """
    _check(weights, gram, group_size)
    columns = weights.shape[1]
    size = group_size or columns
    work = weights.T.contiguous().clone()
    work[dead_columns(gram)] = 0
    factor = inverse_factor(gram).to(weights.dtype, memory_format=torch.contiguous_format)
    deviations = factor.diagonal().unsqueeze(1).contiguous()
    answers = factor / deviations  # row j: how the later columns answer an error in column j
    kept = torch.empty_like(work, dtype=torch.bool)
    errors = torch.empty(BLOCK, work.shape[1], dtype=work.dtype, device=work.device)
    fix: Fix | None = None
    for start, end in blocks(columns, size):
        for at in range(start, end, size):
            if at % size == 0 or fix is None:
                fix = start_group(work[at : at + size])
            these = slice(at, min(at + size, end))
            lost = errors[at - start : these.stop - start]
            fix(work[at:end], kept[these], lost, deviations[these], answers[these, at:end])
        work[end:].addmm_(answers[start:end, end:].T, errors[: end - start], alpha=-1)
    return work.T.contiguous(), kept.T.contiguous()


def inverse_factor(gram: torch.Tensor) -> torch.Tensor:
    """U, float64 upper triangular [in, in], with U^T U the inverse of the damped Hessian.

    It comes from the Cholesky factor of the Hessian with its columns in reverse order: H = R R^T with R upper
    triangular, so U is R's inverse. Dead columns count as independent columns of average size. Raises
    ValueError.
    """
    hessian = 2 * gram.double()
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    mean = float(diagonal[~dead].mean()) if bool((~dead).any()) else 1.0
    diagonal[dead] = mean
    undamped = diagonal.clone()
    for damping in DAMPINGS:
        torch.add(undamped, damping * mean, out=diagonal)
        lower, info = torch.linalg.cholesky_ex(hessian.flip(0, 1))
        if int(info) == 0:
            identity = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
            factor: torch.Tensor = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
            return factor
    raise ValueError(
        f"expected X X^T to be positive semidefinite, got another matrix, even with {DAMPINGS[-1]:g} of its "
        "diagonal's mean added; calibrate again, with more texts"
    )


def dead_columns(gram: torch.Tensor) -> torch.Tensor:
    """bool [in]: the inputs that were always 0; if all were, no column counts as dead."""
    dead: torch.Tensor = gram.diagonal() == 0
    return dead & ~dead.all()


def blocks(columns: int, group_size: int) -> Iterator[tuple[int, int]]:
    """Blocks of at most 128 columns, from each start to before the next.

    If a group begins within a block, it also ends in it: a group's weights must be up to date when it begins.
    """
    if group_size <= BLOCK:
        size = group_size * (BLOCK // group_size)
        yield from ((start, min(start + size, columns)) for start in range(0, columns, size))
        return
    for group in range(0, columns, group_size):
        stop = min(group + group_size, columns)
        yield from ((start, min(start + BLOCK, stop)) for start in range(group, stop, BLOCK))


def _check(weights: torch.Tensor, gram: torch.Tensor, group_size: int | None) -> None:
    columns = weights.shape[1]
    if columns % FOUR or (group_size is not None and (group_size <= 0 or group_size % FOUR)):
        raise ValueError(f"expected multiples of 4, got {columns} columns in groups of {group_size}")
    if gram.shape != (columns, columns):
        raise ValueError(
            f"expected X X^T for {columns} inputs, got {tuple(gram.shape)}; calibrate this layer"
        )
    for what, matrix in (("weights", weights), ("X X^T", gram)):
        if not bool(matrix.isfinite().all()):
            raise ValueError(f"expected finite {what}, got NaN or infinity; check the checkpoints and texts")
