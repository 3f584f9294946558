"""An embedding or a head as its difference from the base's: 8 bits per number, and a scale for each row.

A fine-tune changes them little. So eight bits of the change lose no more than rounding the weight to
bfloat16. `keeps` checks this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from profiler.types import TensorRef
from profiler.variants.types import Difference

TOP = 127  # of a code; the scale is a row's largest change divided by it
LOST = 1.66e-3  # the largest |lost| / |weight|: the loss of rounding normally distributed numbers to bfloat16
LOST_OF_A_ROW = 2.0**-6  # the same for each row: a row that is new to the base has 8 bits of itself
CHUNK = 1 << 24  # values processed together: 64 MiB in float32


def encode(base: torch.Tensor, tuned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 [rows, columns] and scales float32 [rows] of the difference of `tuned` from `base`.

    Both are [rows, columns] and finite.
    """
    codes = torch.empty(tuned.shape, dtype=torch.int8)
    scales = torch.empty(len(tuned))
    for some in _pieces(tuned):
        change = tuned[some].float() - base[some].float()
        scales[some] = change.abs().amax(dim=1) / TOP
        steps = torch.where(scales[some] > 0, scales[some], 1.0)[:, None]
        codes[some] = (change / steps).round_().clamp_(-TOP, TOP).to(torch.int8)
    return codes, scales


def decode(
    base: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[rows, columns] in `dtype`, rounded once: each row is the base's row plus its codes times its scale.

    Takes little memory in addition to the result.
    """
    made = torch.empty(codes.shape, dtype=dtype)
    for some in _pieces(codes):
        made[some] = torch.addcmul(base[some].float(), codes[some].float(), scales[some].float()[:, None])
    return made


def merged(
    base: torch.Tensor, difference: Difference, read: Callable[[TensorRef], torch.Tensor]
) -> torch.Tensor:
    """The variant's tensor that replaces the base's, in the base's type."""
    codes, scales = map(read, difference.tensors)
    return decode(base, codes, scales, base.dtype)


def keeps(base: torch.Tensor, tuned: torch.Tensor) -> bool:
    """Whether a difference loses no more than bfloat16 does over all rows, and little of each row."""
    lost = whole = 0.0
    for some in _pieces(tuned):
        own = tuned[some].float()
        off = decode(base[some], *encode(base[some], tuned[some])) - own
        off_rows, rows = (each.square().sum(dim=1, dtype=torch.float64) for each in (off, own))
        if not bool((off_rows <= LOST_OF_A_ROW**2 * rows).all()):
            return False
        lost, whole = lost + float(off_rows.sum()), whole + float(rows.sum())
    return lost <= LOST**2 * whole


def _pieces(tensor: torch.Tensor) -> Iterator[slice]:
    """Slices of some rows at a time."""
    step = max(1, CHUNK // max(1, tensor.shape[1]))
    yield from (slice(start, start + step) for start in range(0, len(tensor), step))
