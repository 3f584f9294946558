"""Rows of tokens in batches, and the sums over tokens that calibration needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workers.evaluation.encoding import batches

MAX_BATCH_TOKENS = {"cpu": 8192, "cuda": 16384}
HALF = (torch.bfloat16, torch.float16)


@dataclass
class Batch:
    """Rows of similar length, padded at the end to the longest: ids [rows, tokens], lengths [rows].

    Attention looks back only, so padding changes no real token. `hidden` [rows, tokens, hidden] is the input
    of the next block.
    """

    ids: torch.Tensor
    lengths: torch.Tensor
    hidden: torch.Tensor

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def real(self, values: torch.Tensor) -> torch.Tensor:
        """The real tokens' values [real tokens, features] of values [rows, tokens, features]."""
        width = self.ids.shape[1]
        if self.tokens == self.ids.numel():
            return values.reshape(-1, values.shape[-1])
        is_real = torch.arange(width)[None, :] < self.lengths[:, None]
        return values[is_real.to(values.device)]


def batches_of(rows: Sequence[torch.Tensor], device: str) -> list[Batch]:
    """All rows in batches, the longest first, so that there is little padding."""
    most = MAX_BATCH_TOKENS.get(torch.device(device).type, MAX_BATCH_TOKENS["cpu"])
    lengths = [len(row) for row in rows]
    return [_batch([rows[i] for i in batch]) for batch in batches(lengths, most)]


def _batch(rows: list[torch.Tensor]) -> Batch:
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return Batch(ids, torch.tensor([len(row) for row in rows]), torch.empty(0))


def add_gram(gram: torch.Tensor, inputs: torch.Tensor, tokens: int) -> None:
    """Add X X^T / tokens to `gram` [in, in] float32, for X^T = `inputs` [n, in], a part of all `tokens`.

    A GPU multiplies half-precision inputs directly, and sums the exact products in float32.
    """
    if inputs.device.type == "cuda" and inputs.dtype in HALF:
        gram.add_(torch.mm(inputs.T, inputs, out_dtype=torch.float32), alpha=1 / tokens)
    else:
        wide = inputs.float()
        gram.addmm_(wide.T, wide, alpha=1 / tokens)
