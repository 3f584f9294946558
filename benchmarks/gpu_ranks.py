"""Each rank's own report about variants; and a slow way to its GPU.

For vLLM's `collective_rpc`, which calls a function in every rank, with its worker first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from workers.kernels.sparse_delta import tensor_cores_check as sparse_check
from workers.kernels.svd_delta import tensor_cores_check as svd_check
from workers.variants import travelling

PIECE_BYTES = 16 << 10  # of a variant on the slow way: a layer's weights are in several
BALLAST_BYTES = 32 << 20  # that go before each: more than half a millisecond

_TOLD = "_ostinato_told"


class Slowly:
    """A line to the GPU on which something else goes before every piece, as on a link that others use."""

    def __init__(self, line: travelling.Line, device: torch.device) -> None:
        self._line = line
        self._ballast = torch.empty(BALLAST_BYTES, dtype=torch.uint8, pin_memory=True)
        self._into = torch.empty(BALLAST_BYTES, dtype=torch.uint8, device=device)

    def copy(self, into: int, source: int, size: int) -> None:
        self._line.copy(self._into.data_ptr(), self._ballast.data_ptr(), BALLAST_BYTES)
        self._line.copy(into, source, size)

    def write(self, arrivals: travelling.Arrivals) -> None:
        self._line.write(arrivals)


def watch(worker: Any, slowly: bool) -> None:
    """Count from now on what `kernel_report` reports; with `slowly` variants take their time to the GPU."""
    manager = worker.model_runner.lora_manager
    cache, memory = manager.variant_cache, manager.variant_cache._memory
    counts: Counter[str] = Counter()
    setattr(manager, _TOLD, counts)
    if slowly and memory._line is not None:
        travelling.PIECE_BYTES = PIECE_BYTES
        memory._line = Slowly(memory._line, memory.arena.device)

    def placing(slot: int, variant: Any) -> None:
        counts["placed"] += 1
        counts["sent"] += memory.streams(variant)

    def beginning(uids: set[int]) -> None:
        counts["steps"] += 1
        sent = memory._sent
        if sent is not None and memory._copies is not None and not memory._copies.query():
            counts["begun_with_one_under_way"] += any(cache._host.get(uid) is sent for uid in uids)

    def describing(requests: Any, mapping: Any) -> None:
        for uid, rows in Counter(mapping.index_mapping).items():
            if "sparse_delta" in cache.operations_of.get(uid, ()):
                counts["most_rows_of_a_sparse_delta"] = max(rows, counts["most_rows_of_a_sparse_delta"])

    def described() -> None:
        counts["steps_with_merged_rows"] += bool(manager.batch.merged)

    def merging_alone(uid: int, slot: int) -> None:
        counts["merged_in_the_bases_place"] += 1

    _before(memory, "place", placing)
    _before(cache, "begin_step", beginning)
    _before(manager, "set_active_adapters", describing)
    _after(manager, "set_active_adapters", described)
    if manager._steps._merged is not None:
        _before(manager._steps._merged, "merge", merging_alone)


def kernel_report(worker: Any) -> dict[str, Any]:
    """Which kernels serve here, and what was counted."""
    manager = worker.model_runner.lora_manager
    dtype = manager._dtype
    return {
        "rank": manager._parallel.rank,
        "svd_in_cuda": svd_check.chosen(dtype),
        "sparse_on_tensor_cores": sparse_check.chosen(dtype),
        "sends": manager.variant_cache._memory._line is not None,
        **getattr(manager, _TOLD),
    }


def _after(owner: Any, name: str, see: Callable[[], None]) -> None:
    """Whenever it was called."""
    inner = getattr(owner, name)

    def seen(*arguments: Any) -> Any:
        given = inner(*arguments)
        see()
        return given

    setattr(owner, name, seen)


def _before(owner: Any, name: str, see: Callable[..., None]) -> None:
    """The first caller is seen first."""
    inner = getattr(owner, name)

    def seen(*arguments: Any) -> Any:
        see(*arguments)
        return inner(*arguments)

    setattr(owner, name, seen)
