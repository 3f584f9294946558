"""How the next step computes its variants: beside the base, merged for its own rows, or merged in the base's
place."""

from __future__ import annotations

from typing import Any

from workers.kernels import sparse_delta
from workers.variants.alone import BASE_UID, Alone
from workers.variants.graph_choice import Graph, Requests
from workers.variants.merged_slot import MergedSlot
from workers.variants.variant_cache import VariantCache


class StepChoice:
    """`weight_bytes`: of a linear into which deltas can be merged, on average; 0 if there is none. `merged`:
    the slot for a variant that runs alone, if this engine has one."""

    def __init__(self, cache: VariantCache, weight_bytes: float, merged: MergedSlot | None = None) -> None:
        self._cache = cache
        self._weight_bytes = weight_bytes
        self._merged = merged
        self._requests = Requests()
        self._alone = Alone()
        self._graph = Graph.OF_ITS_VARIANTS

    @property
    def ungraphed(self) -> bool:
        """Whether the step runs without a graph so that it can merge deltas for its own rows."""
        return self._graph is Graph.NONE

    def choose(self, step: Any) -> Graph:
        """To be asked before each of vLLM's steps (SchedulerOutput)."""
        self._requests.see(step)
        if step.num_scheduled_tokens:  # else nothing runs
            self._graph = self._of(step)
        return self._graph

    def _of(self, step: Any) -> Graph:
        if self._alone.step(self._mergeable_alone(step), sum(step.num_scheduled_tokens.values())) != BASE_UID:
            return Graph.OF_THE_BASE
        return Graph.NONE if self._merges(step) else Graph.OF_ITS_VARIANTS

    def _mergeable_alone(self, step: Any) -> int:
        if self._merged is None:
            return BASE_UID
        uid = self._requests.alone(step)
        slot = self._cache.slot_of.get(uid)
        if slot is None:
            return BASE_UID
        return uid if self._merged.takes(uid, slot, self._cache.operations_of[uid]) else BASE_UID

    def put_weights(self, uids: set[int]) -> bool:
        """Have the weights that the step which was chosen for needs; whether those are of its variant merged
        in the base's place. `uids`: of all its rows but those of stand-ins."""
        if self._merged is None:
            return False
        wanted = self._alone.merged if uids == {self._alone.merged} else BASE_UID
        if self._graph is Graph.OF_THE_BASE and uids - {BASE_UID} and wanted == BASE_UID:
            raise RuntimeError(f"rows of variants {sorted(uids)} in a step of {self._alone.merged} alone")
        if wanted != self._merged.holds:
            if wanted == BASE_UID:
                self._merged.restore()
            else:
                self._merged.merge(wanted, self._cache.slot_of[wanted])
        return wanted != BASE_UID

    # --- merging for a step's own rows -------------------------------------------------------------

    def _merges(self, step: Any) -> bool:
        if not self._weight_bytes:
            return False
        enough = sparse_delta.ungraphed_from(len(step.num_scheduled_tokens), self._weight_bytes)
        many = self._requests.of_at_least(enough, step)
        return self._has(many, "sparse_delta") and not self._has_boft(step)

    def _has(self, uids: set[int], operation: str) -> bool:
        found = self._cache.operations_of
        return any(operation in found.get(uid, ()) for uid in uids)

    def _has_boft(self, step: Any) -> bool:
        """Its rows have inputs of their own in every layer, and nothing is merged beside them."""
        return self._has(self._requests.of_at_least(1, step), "boft")
