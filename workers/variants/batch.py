"""The batch that runs now, as all hooked layers see it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from workers.kernels.rows import BASE, Int32s, Rows, Run, long_runs
from workers.kernels.sparse_delta import MERGED_FROM

NOTHING: frozenset[str] = frozenset()


class Batch:
    """`tokens` says which slot each token row belongs to, `samples` each row that a token is sampled for, and
    `head_rows` each row that the head runs on now: those of `samples`, or some of `tokens` (`scored`).

    `merged` are runs of rows so long that it pays to merge their variant's sparse delta into the base's
    weights; `others` says what `tokens` does, but that these rows are the base's. A graph holds for every
    batch, so a batch of at most `largest_graph` rows has no such runs, unless `describe` is told that it runs
    without a graph. If `largest_graph` is None no batch has any.

    `operations` are those that have something to do in this batch; the layers launch no others, except
    that what runs while a CUDA graph is captured must hold for every later batch.
    """

    def __init__(
        self,
        max_tokens: int,
        max_samples: int,
        slots: int,
        device: torch.device,
        largest_graph: int | None = None,
    ) -> None:
        self.tokens = Rows(max_tokens, slots, device)
        self.samples = Rows(max_samples, slots, device)
        self.scored = Rows(max_tokens, slots, device)
        self.head_rows = self.samples
        self.operations = NOTHING
        self._largest_graph = largest_graph
        self.merged: tuple[Run, ...] = ()
        self.others = self.tokens
        if largest_graph is not None:
            self.others = Rows(max_tokens, slots, device, exact=True)

    @property
    def merges(self) -> bool:
        """Whether any batch may have `merged` rows."""
        return self._largest_graph is not None

    def describe(
        self,
        token_variants: Sequence[int],
        sample_variants: Sequence[int],
        slot_of: Mapping[int, int],
        operations: frozenset[str],
        sparse: Collection[int] = (),
        ungraphed: bool = False,
    ) -> None:
        """A new batch. Variants are uids by row, 0 for the base; every other one is in `slot_of`. Those of
        slots `sparse` are sparse deltas. `ungraphed`: it runs without a graph, whatever its size."""
        self.operations = operations
        self.merged = ()
        if not operations:
            return  # no layer asks whose row is whose
        slots = _slots(token_variants, slot_of)
        self.tokens.update(slots)
        if self._largest_graph is not None and (ungraphed or len(slots) > self._largest_graph):
            self._merge(slots, sparse)
        self.samples.update(_slots(sample_variants, slot_of))

    def describe_as_base(self, tokens: int, samples: int) -> None:
        """A new batch of so many rows, whose variant's weights are in the base's place: nothing is added."""
        self.operations, self.merged = NOTHING, ()
        self.tokens.update(np.full(tokens, BASE, np.int32))
        self.samples.update(np.full(samples, BASE, np.int32))

    def _merge(self, slots: Int32s, sparse: Collection[int]) -> None:
        self.merged = long_runs(slots, sparse, MERGED_FROM)
        if self.merged:
            others = slots.copy()
            for run in self.merged:
                others[run.rows] = BASE
            self.others.update(others)

    @contextmanager
    def scoring(self, first: int, count: int) -> Iterator[None]:
        """The head runs on token rows `first` to `first + count` meanwhile, as prompts are scored."""
        if "head" in self.operations:
            self.scored.update(self.tokens.grouping.slots[first : first + count])
        self.head_rows = self.scored
        try:
            yield
        finally:
            self.head_rows = self.samples


def _slots(variants: Sequence[int], slot_of: Mapping[int, int]) -> Int32s:
    uids = np.asarray(variants, dtype=np.int64)
    used, where = np.unique(uids, return_inverse=True)
    slots = np.array([slot_of[int(uid)] if uid else BASE for uid in used], dtype=np.int32)
    return slots[where] if len(used) else np.empty(0, np.int32)
