"""The batch that runs now, as all hooked layers see it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from workers.kernels.rows import BASE, Rows

NOTHING: frozenset[str] = frozenset()


class Batch:
    """`tokens` says which slot each token row belongs to, `samples` each row that a token is sampled for, and
    `head_rows` each row that the head runs on now: those of `samples`, or some of `tokens` (`scored`).

    `operations` are those that have something to do in this batch; the layers launch no others, except
    that what runs while a CUDA graph is captured must hold for every later batch.
    """

    def __init__(self, max_tokens: int, max_samples: int, slots: int, device: torch.device) -> None:
        self.tokens = Rows(max_tokens, slots, device)
        self.samples = Rows(max_samples, slots, device)
        self.scored = Rows(max_tokens, slots, device)
        self.head_rows = self.samples
        self.operations = NOTHING

    def describe(
        self,
        token_variants: Sequence[int],
        sample_variants: Sequence[int],
        slot_of: Mapping[int, int],
        operations: frozenset[str],
    ) -> None:
        """A new batch. Variants are uids by row, 0 for the base; every other one is in `slot_of`."""
        self.operations = operations
        if not operations:
            return  # no layer asks whose row is whose
        self.tokens.update(_slots(token_variants, slot_of))
        self.samples.update(_slots(sample_variants, slot_of))

    @contextmanager
    def scoring(self, first: int, count: int) -> Iterator[None]:
        """The head runs on token rows `first` to `first + count` meanwhile, as prompts are scored."""
        if self.operations:
            self.scored.update(self.tokens.grouping.slots[first : first + count])
        self.head_rows = self.scored
        try:
            yield
        finally:
            self.head_rows = self.samples


def _slots(variants: Sequence[int], slot_of: Mapping[int, int]) -> npt.NDArray[np.int32]:
    uids = np.asarray(variants, dtype=np.int64)
    used, where = np.unique(uids, return_inverse=True)
    slots = np.array([slot_of[int(uid)] if uid else BASE for uid in used], dtype=np.int32)
    return slots[where] if len(used) else np.empty(0, np.int32)
