"""The batch that runs now, as all hooked layers see it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from workers.kernels.rows import BASE, LARGE_FROM, Int32s, Rows, Run
from workers.kernels.sparse_delta.row_tiles import RowTiles, merged_runs

NOTHING: frozenset[str] = frozenset()


class Batch:
    """The rows of the current batch, with their slots.

    `tokens` has the slot of each token row, and `samples` that of each row for which a token is sampled.
    `head_rows` has the rows on which the head runs now: `samples`, or some of `tokens` (`scored`).

    `merged` are runs of rows long enough to use their variant's merged weights instead of the base's.
    `others` is like `tokens`, but with these rows as the base's; `row_tiles` has the tiles of all rows.
    Without `merges` no batch has such runs.

    `operations` are the operations that this batch needs; the layers launch no others. The exception is the
    capture of a CUDA graph, whose launches must be valid for every later batch.
    """

    def __init__(
        self,
        max_tokens: int,
        max_samples: int,
        slots: int,
        device: torch.device,
        merges: bool = False,
    ) -> None:
        self.tokens = Rows(max_tokens, slots, device)
        self.samples = Rows(max_samples, slots, device)
        self.scored = Rows(max_tokens, slots, device)
        self.head_rows = self.samples
        self.operations = NOTHING
        self.merged: tuple[Run, ...] = ()
        self.others = Rows(max_tokens, slots, device) if merges else self.tokens
        self.row_tiles = RowTiles(max_tokens, device) if merges else None

    def describe(
        self,
        token_variants: Sequence[int],
        sample_variants: Sequence[int],
        slot_of: Mapping[int, int],
        operations: frozenset[str],
        sparse: Collection[int] = (),
    ) -> None:
        """Describe a new batch.

        Variants are uids by row, 0 for the base; every other uid is in `slot_of`. The variants in slots
        `sparse` are sparse deltas.
        """
        self.operations = operations
        self.merged = ()
        if not any(token_variants):
            return  # no operation reads the rows' slots
        # Also if this rank has no part of the variants: vLLM chooses a graph by their number, and a graph
        # with variants has all operations.
        slots = _slots(token_variants, slot_of)
        self.tokens.update(slots)
        if self.row_tiles is not None:
            self._merge(slots, sparse, self.row_tiles)
        self.samples.update(_slots(sample_variants, slot_of))

    def describe_as_base(self, tokens: int, samples: int) -> None:
        """Describe a batch of `tokens` and `samples` rows whose variant is merged into the base: nothing is
        added.
        """
        self.operations, self.merged = NOTHING, ()
        self.tokens.update(np.full(tokens, BASE, np.int32))
        self.samples.update(np.full(samples, BASE, np.int32))

    def _merge(self, slots: Int32s, sparse: Collection[int], tiles: RowTiles) -> None:
        self.merged = merged_runs(slots, sparse)
        tiles.update(self.merged, len(slots))
        if not self.merged:
            self.others.update(slots, self.tokens.grouping)
            return
        others = slots.copy()
        for run in self.merged:
            others[run.rows] = BASE
        self.others.update(others)

    def tiles_of(self, rows: int) -> torch.Tensor | None:
        """The tiles of a product over `rows` rows if some rows use merged weights; None if all use the
        base's.

        A graph's launches must be valid for every batch of its size, so all large graphs have tiles.
        """
        if self.row_tiles is None or rows < LARGE_FROM:
            return None
        return self.row_tiles.of(rows) if self.merged or _is_captured(self.row_tiles.device) else None

    @contextmanager
    def scoring(self, first: int, count: int) -> Iterator[None]:
        """Within the context, the head runs on token rows `first` to `first + count`, to score prompts."""
        if "head" in self.operations:
            self.scored.update(self.tokens.grouping.slots[first : first + count])
        self.head_rows = self.scored
        try:
            yield
        finally:
            self.head_rows = self.samples


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _slots(variants: Sequence[int], slot_of: Mapping[int, int]) -> Int32s:
    uids = np.asarray(variants, dtype=np.int64)
    used, where = np.unique(uids, return_inverse=True)
    slots = np.array([slot_of[int(uid)] if uid else BASE for uid in used], dtype=np.int32)
    return slots[where] if len(used) else np.empty(0, np.int32)
