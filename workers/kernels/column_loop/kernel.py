"""The column loop on a GPU: a program holds all columns of some outputs in registers, and walks them.

The first, second, third and fourth columns of every four are a tensor each, [32, OUTPUTS]. To read four
columns, a program sums each of the four tensors with all other columns set to 0. Products are float32, not
TF32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workers.kernels.column_loop.reference import FOUR, MAX_COLUMNS

OUTPUTS = 16  # of a program: one warp, which waits for no other; with 32 outputs registers would spill
NEAREST = tl.constexpr(1.5 * 2**23)  # float32 has no digits behind the point there, and rounds half to even


@triton.jit
def _load(work, four, output, size, outputs, K: tl.constexpr):
    """Columns K, K + 4, ...: [FOURS, OUTPUTS]."""
    column = 4 * four[:, None] + K
    mask = (column < size) & (output[None, :] < outputs)
    return tl.load(work + column * outputs + output[None, :], mask=mask, other=0.0)


@triton.jit
def _store(work, values, four, output, size, count, outputs, K: tl.constexpr):
    """Store those of the columns that are not fixed."""
    column = 4 * four[:, None] + K
    mask = (column >= count) & (column < size) & (output[None, :] < outputs)
    tl.store(work + column * outputs + output[None, :], values, mask=mask)


@triton.jit
def _answer(w0, w1, w2, w3, answers, four, size, error):
    """Add all columns' answers to an error in one column. Fixed columns may change, too, but are not read
    again.
    """
    at = 4 * four
    w0 -= tl.load(answers + at, mask=at < size, other=0.0)[:, None] * error[None, :]
    w1 -= tl.load(answers + at + 1, mask=at + 1 < size, other=0.0)[:, None] * error[None, :]
    w2 -= tl.load(answers + at + 2, mask=at + 2 < size, other=0.0)[:, None] * error[None, :]
    w3 -= tl.load(answers + at + 3, mask=at + 3 < size, other=0.0)[:, None] * error[None, :]
    return w0, w1, w2, w3


@triton.jit
def _fix(work, kept, errors, weight, keep, scale, divisor, column, output, outputs, HALF: tl.constexpr):
    """Round one column [OUTPUTS], if it is kept; returns the column's error."""
    step = tl.div_rn(tl.where(keep, weight, 0.0), divisor)
    step = tl.minimum(tl.maximum(step, -HALF), HALF - 1)
    rounded = ((step + NEAREST) - NEAREST) * scale
    error = weight - rounded
    here = column * outputs + output
    tl.store(work + here, rounded, mask=output < outputs)
    tl.store(kept + here, keep.to(tl.uint8), mask=output < outputs)
    tl.store(errors + here, error, mask=output < outputs)
    return error


# `count` and `size` take many values where groups are small.
@triton.jit(do_not_specialize=["count", "size"])
def _fix_columns(work, kept, errors, deviations, answers, scales, count, size, outputs, answers_stride,
                 HALF: tl.constexpr, FOURS: tl.constexpr, OUTPUTS: tl.constexpr):  # fmt: skip
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    four = tl.arange(0, FOURS)
    scale = tl.load(scales + output, mask=output < outputs, other=0.0).to(tl.float32)
    divisor = tl.where(scale > 0, scale, 1.0)
    w0 = _load(work, four, output, size, outputs, 0)
    w1 = _load(work, four, output, size, outputs, 1)
    w2 = _load(work, four, output, size, outputs, 2)
    w3 = _load(work, four, output, size, outputs, 3)
    for i in range(0, count // 4):
        at = 4 * i
        a = answers + at * answers_stride
        b = a + answers_stride
        c = b + answers_stride
        d = c + answers_stride
        mine = (four == i)[:, None]
        first = tl.sum(tl.where(mine, w0, 0.0), axis=0)
        second = tl.sum(tl.where(mine, w1, 0.0), axis=0)
        third = tl.sum(tl.where(mine, w2, 0.0), axis=0)
        fourth = tl.sum(tl.where(mine, w3, 0.0), axis=0)

        cost0 = tl.abs(tl.div_rn(first, tl.load(deviations + at)))
        cost1 = tl.abs(tl.div_rn(second, tl.load(deviations + at + 1)))
        cost2 = tl.abs(tl.div_rn(third, tl.load(deviations + at + 2)))
        cost3 = tl.abs(tl.div_rn(fourth, tl.load(deviations + at + 3)))
        ab = (cost0 >= cost1).to(tl.int32)  # 1: the earlier wins
        ac = (cost0 >= cost2).to(tl.int32)
        ad = (cost0 >= cost3).to(tl.int32)
        bc = (cost1 >= cost2).to(tl.int32)
        bd = (cost1 >= cost3).to(tl.int32)
        cd = (cost2 >= cost3).to(tl.int32)

        error0 = _fix(work, kept, errors, first, ab + ac + ad >= 2, scale, divisor, at, output, outputs, HALF)
        second -= tl.load(a + at + 1) * error0
        third -= tl.load(a + at + 2) * error0
        fourth -= tl.load(a + at + 3) * error0
        error1 = _fix(work, kept, errors, second, bc + bd >= ab + 1, scale, divisor, at + 1, output, outputs,
                      HALF)  # fmt: skip
        third -= tl.load(b + at + 2) * error1
        fourth -= tl.load(b + at + 3) * error1
        error2 = _fix(work, kept, errors, third, cd >= ac + bc, scale, divisor, at + 2, output, outputs, HALF)
        fourth -= tl.load(c + at + 3) * error2
        error3 = _fix(work, kept, errors, fourth, ad + bd + cd < 2, scale, divisor, at + 3, output, outputs,
                      HALF)  # fmt: skip
        w0, w1, w2, w3 = _answer(w0, w1, w2, w3, a, four, size, error0)
        w0, w1, w2, w3 = _answer(w0, w1, w2, w3, b, four, size, error1)
        w0, w1, w2, w3 = _answer(w0, w1, w2, w3, c, four, size, error2)
        w0, w1, w2, w3 = _answer(w0, w1, w2, w3, d, four, size, error3)
    _store(work, w0, four, output, size, count, outputs, 0)
    _store(work, w1, four, output, size, count, outputs, 1)
    _store(work, w2, four, output, size, count, outputs, 2)
    _store(work, w3, four, output, size, count, outputs, 3)


def apply(
    work: torch.Tensor,
    kept: torch.Tensor,
    errors: torch.Tensor,
    deviations: torch.Tensor,
    answers: torch.Tensor,
    scales: torch.Tensor,
    bits: int,
) -> None:
    size, outputs = work.shape
    if not all(t.is_contiguous() for t in (work, kept, errors, deviations, scales)) or answers.stride(1) != 1:
        raise ValueError(
            "expected contiguous columns of weights, masks and errors, and contiguous rows of answers"
        )
    with torch.cuda.device_of(work):
        _fix_columns[(triton.cdiv(outputs, OUTPUTS),)](
            work, kept.view(torch.uint8), errors, deviations, answers, scales,
            len(kept), size, outputs, answers.stride(0),
            HALF=2 ** (bits - 1), FOURS=MAX_COLUMNS // FOUR, OUTPUTS=OUTPUTS, num_warps=1,
        )  # fmt: skip
