"""How the next step computes its variants: in addition to the base, or merged in the base's place."""

from __future__ import annotations

from typing import Any

from workers.patches.vllm.graph_choice import Graph
from workers.variants.alone import BASE_UID, Alone
from workers.variants.merged_slot import MergedSlot
from workers.variants.variant_cache import VariantCache


class Requests:
    """The variant of each request of the runner: vLLM names it once, with a request's first step."""

    def __init__(self) -> None:
        self._uid_of: dict[str, int] = {}

    def see(self, step: Any) -> None:
        """Update from `step`, vLLM's SchedulerOutput."""
        for request_id in step.finished_req_ids:
            self._uid_of.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            if new.lora_request is not None:
                self._uid_of[new.req_id] = new.lora_request.lora_int_id

    def alone(self, step: Any) -> int:
        """The variant of all requests of this step; BASE_UID if they have several or none."""
        uids = self.variants(step)
        return uids.pop() if len(uids) == 1 else BASE_UID

    def variants(self, step: Any) -> set[int]:
        """The variants of all requests of this step; BASE_UID for requests of the base."""
        return {self._uid_of.get(request_id, BASE_UID) for request_id in step.num_scheduled_tokens}


class StepChoice:
    """The choice for each step. `merged`: the slot for a variant that runs alone, if this engine has one."""

    def __init__(self, cache: VariantCache, merged: MergedSlot | None = None) -> None:
        self._cache = cache
        self._merged = merged
        self._requests = Requests()
        self._alone = Alone()
        self._graph = Graph.OF_ITS_VARIANTS

    def choose(self, step: Any) -> Graph:
        """Choose the graph of a vLLM step (SchedulerOutput); must be called before each step."""
        self._requests.see(step)
        if step.num_scheduled_tokens:  # otherwise nothing runs
            self._graph = self._of(step)
        return self._graph

    def _of(self, step: Any) -> Graph:
        if self._alone.step(self._mergeable_alone(step), sum(step.num_scheduled_tokens.values())) != BASE_UID:
            return Graph.OF_THE_BASE
        return Graph.OF_ITS_VARIANTS

    def _mergeable_alone(self, step: Any) -> int:
        if self._merged is None:
            return BASE_UID
        uid = self._requests.alone(step)
        slot = self._cache.slot_of.get(uid)
        if slot is None:
            return BASE_UID
        return uid if self._merged.takes(uid, slot, self._cache.operations_of[uid]) else BASE_UID

    def put_weights(self, uids: set[int]) -> bool:
        """Put the weights in place that the chosen step needs; returns whether its variant is merged into the
        base.

        `uids`: the variants of all its rows except stand-ins.
        """
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
