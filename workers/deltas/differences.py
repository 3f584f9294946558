"""An embedding or a head as what it differs by from the base's: 8 bits a number, and a scale for each row.

A fine-tune changes them little. Eight bits of the change then keep more of the weight than the 16 bits that
it had, at half the bytes; `keeps` tells where that is so.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

TOP = 127  # of a code; the scale is a row's largest change over it
KEPT = 2.0**-9  # |lost| / |weight| at most: half of what the last bit of a bfloat16 is worth
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


def decode(base: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [rows, columns]: the base's rows, to each of which its codes times its scale are added."""
    return torch.addcmul(base.float(), codes.float(), scales.float()[:, None])


def keeps(base: torch.Tensor, tuned: torch.Tensor) -> bool:
    """Whether a difference loses less than bfloat16 does of a weight."""
    lost = whole = 0.0
    for some in _pieces(tuned):
        again = decode(base[some], *encode(base[some], tuned[some]))
        lost += float((again - tuned[some].float()).square().sum(dtype=torch.float64))
        whole += float(tuned[some].float().square().sum(dtype=torch.float64))
    return lost <= KEPT**2 * whole


def _pieces(tensor: torch.Tensor) -> Iterator[slice]:
    """Some rows at a time."""
    step = max(1, CHUNK // max(1, tensor.shape[1]))
    yield from (slice(start, start + step) for start in range(0, len(tensor), step))
