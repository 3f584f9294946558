"""Biases on a GPU: one program per row and group of columns; programs for rows of the base end at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workers.kernels.bias.layout import WIDTH
from workers.kernels.rows import Rows

COLUMNS = 1024


@triton.jit
def _bias(out, base_bias, arena, table, slots, out_stride, width,
          BIASED: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    fields = table + slot.to(tl.int64) * WIDTH
    if tl.load(fields) == 0:
        return
    own = (arena + tl.multiple_of(tl.load(fields + 1), 128)).to(tl.pointer_type(tl.float32))
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < width
    bias = tl.load(own + columns, mask=mask, other=0)
    change = bias
    if BIASED:
        change -= tl.load(base_bias + columns, mask=mask, other=0).to(tl.float32)
    change = tl.where(bias == bias, change, 0.0)  # noqa: PLR0124  # NaN: the base's bias stays
    here = out + row * out_stride + columns
    result = tl.load(here, mask=mask, other=0).to(tl.float32) + change
    tl.store(here, result.to(out.dtype.element_ty), mask=mask)


def apply(
    out: torch.Tensor, base_bias: torch.Tensor | None, arena: torch.Tensor, table: torch.Tensor, rows: Rows
) -> None:
    count, width = out.shape
    grid = (count, triton.cdiv(width, COLUMNS))
    _bias[grid](
        out, out if base_bias is None else base_bias, arena, table, rows.slots(count), out.stride(0), width,
        BIASED=base_bias is not None, WIDTH=WIDTH, COLUMNS=COLUMNS,
    )  # fmt: skip
