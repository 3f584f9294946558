"""An embedding or a head as what it differs by from the base's: 8 bits a number, and a scale for each row.

A fine-tune changes them little: eight bits of the change then lose no more than rounding the weight to
bfloat16 does. `keeps` tells where that is so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from profiler.types import TensorRef
from profiler.variants.types import Difference

TOP = 127  # of a code; the scale is a row's largest change over it
LOST = 1.66e-3  # |lost| / |weight| at most: what rounding normally distributed numbers to bfloat16 loses
LOST_OF_A_ROW = 2.0**-6  # the same of each row: one that the base hardly had has 8 bits of itself
CHUNK = 1 << 24  # values looked at together: 64 MiB in float32


def encode(base: torch.Tensor, tuned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 [rows, columns] and scales float32 [rows] of what `tuned` differs by from `base`, both
    [rows, columns] and finite."""
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
    """[rows, columns] in `dtype`, rounded once: the base's rows, to each of which its codes times its scale
    are added. Takes little memory beside the result."""
    made = torch.empty(codes.shape, dtype=dtype)
    for some in _pieces(codes):
        made[some] = torch.addcmul(base[some].float(), codes[some].float(), scales[some].float()[:, None])
    return made


def merged(
    base: torch.Tensor, difference: Difference, read: Callable[[TensorRef], torch.Tensor]
) -> torch.Tensor:
    """The tensor that a variant has in the base's place, in the base's type."""
    codes, scales = map(read, difference.tensors)
    return decode(base, codes, scales, base.dtype)


def keeps(base: torch.Tensor, tuned: torch.Tensor) -> bool:
    """Whether a difference loses no more than bfloat16 does, over all rows, and little of each."""
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
    """Some rows at a time."""
    step = max(1, CHUNK // max(1, tensor.shape[1]))
    yield from (slice(start, start + step) for start in range(0, len(tensor), step))
