"""The baseline on the GPU: whole fine-tuned models, swapped in and out (DeltaZip's vLLM-SCB, section 6.1).

The paper's words: "1) Swapping models in and out of GPU memory, 2) Continuous batching of different
full-precision models by looping through models in a batch and 3) Batching available requests for the same
model", with "the maximum number of models that can fit in the GPU memory". Their code keeps models in slots
and loops over the models of a batch within every layer. Here, on today's vLLM, it is this:

- `slots` whole models lie on the GPU, each complete: linear layers, norms, embedding and head. Which, and who
  waits, is decided by our own scheduler and residency as for deltas: first come first served, models that run
  already may skip the line, parents and children, who was used longest ago leaves.
- A swap copies all bytes of a model from page-locked host memory into its slot, on its own stream during the
running batch, as for a delta. In the paper it stops the engine, and may come from disk.
- A forward pass is of one model. `turns` gives those with something to do a few steps each (`quantum`), so
  that each has a continuous batch of its own, with chunked prefill, CUDA graphs and asynchronous scheduling.
- vLLM's graphs know one address for each weight, so a turn begins with a copy from the slot to there: 13.5 GB
read and written for a 7B, about 6 ms on an H200 with steps of 5, and memory for one more model. A longer
quantum makes that cheaper, and others wait longer.

Models share `host_copies` distinct blocks of host memory in turn: 32 of 13.5 GB do not fit there.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.serving.settings import SwapConfig
from workers.variants.loader import Loader
from workers.variants.manager import VariantManager

ALIGNMENT = 256  # of a tensor within a model


@dataclass(frozen=True)
class HostModel:
    memory: torch.Tensor

    @property
    def device_bytes(self) -> int:
        return self.memory.numel()


class WholeModels:
    """In the place of `VariantCache` (`workers.variants`): the same calls, whole models in the slots."""

    def __init__(self, weights: Sequence[torch.Tensor], slots: int, own: SwapConfig) -> None:
        self._weights = list(weights)
        self._device = self._weights[0].device
        self._starts, self._bytes = _layout(self._weights)
        on_gpu = self._device.type == "cuda"
        self._copies = torch.cuda.Stream(self._device) if on_gpu else None
        self._host = [HostModel(self._host_copy(number, on_gpu)) for number in range(own.host_copies)]
        self._in_host = set[int]()
        self._slots = [torch.empty(self._bytes, dtype=torch.uint8, device=self._device) for _ in range(slots)]
        self._views = [self._views_of(slot) for slot in self._slots]
        self._active: int | None = None
        self._lock = threading.Lock()
        self.compute: torch.cuda.Stream | None = None
        self.slot_of: dict[int, int] = {}

    def _host_copy(self, number: int, pinned: bool) -> torch.Tensor:
        """A model unlike the others: the engine's weights with their rows moved on."""
        memory = torch.empty(self._bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        for weight, view in zip(self._weights, self._views_of(memory), strict=True):
            view.copy_(weight.roll(number, 0))
        return memory

    def _views_of(self, memory: torch.Tensor) -> list[torch.Tensor]:
        pairs = zip(self._weights, self._starts, strict=True)
        return [memory[at : at + w.nbytes].view(w.dtype).view(w.shape) for w, at in pairs]

    # --- what the loader asks ------------------------------------------------------------------

    def prepare(self, uid: int, path: str) -> HostModel:
        """All are in host memory from the start."""
        with self._lock:
            self._in_host.add(uid)
        return self._host[uid % len(self._host)]

    def holds(self, uid: int) -> bool:
        return True

    @property
    def capacity_bytes(self) -> int:
        return self._bytes * len(self._slots)

    def streams(self, uid: int) -> bool:
        return False  # a step needs all of it

    def settle(self) -> None:
        """What is placed is there."""

    def place(self, uid: int, path: str, slot: int) -> int:
        """Copy a model into a slot that no batch in flight uses. Blocking; batches run on."""
        model = self.prepare(uid, path)
        self._vacate(slot)
        if self._copies is None:
            self._slots[slot].copy_(model.memory)
        else:
            with torch.cuda.stream(self._copies):
                if self.compute is not None:
                    self._copies.wait_stream(self.compute)
                self._slots[slot].copy_(model.memory, non_blocking=True)
            self._copies.synchronize()
        self.slot_of[uid] = slot  # last: from here on batches may use it
        return self._bytes

    def clear(self, slot: int) -> None:
        self._vacate(slot)

    def _vacate(self, slot: int) -> None:
        for uid in [uid for uid, taken in self.slot_of.items() if taken == slot]:
            del self.slot_of[uid]

    def forget(self, uid: int) -> None:
        with self._lock:
            self._in_host.discard(uid)

    def in_host(self) -> dict[int, int]:
        with self._lock:
            return dict.fromkeys(self._in_host, self._bytes)

    def staying(self) -> dict[int, int]:
        return {}

    # --- every step ----------------------------------------------------------------------------

    def activate(self, uid: int) -> None:
        """The next forward pass is of this model: a copy on the GPU, in order with those passes."""
        if self._active != uid:
            torch._foreach_copy_(self._weights, self._views[self.slot_of[uid]], non_blocking=True)
            self._active = uid


def _layout(weights: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Where each weight begins in a block that holds all, and that block's bytes."""
    starts, at = [], 0
    for weight in weights:
        starts.append(at)
        at += math.ceil(weight.nbytes / ALIGNMENT) * ALIGNMENT
    return starts, at


class WholeModelManager(VariantManager):
    """The object that vLLM takes for its manager of adapters; an adapter is a whole model. No layer is
    hooked."""

    variant_cache: Any

    def create_lora_manager(self, model: torch.nn.Module, vllm_config: Any) -> torch.nn.Module:
        own = SwapConfig.of(vllm_config)
        weights = [parameter.data for parameter in model.parameters() if parameter.numel()]
        self.variant_cache = models = WholeModels(weights, self.config.slots, own)
        self._loader = Loader.connect(self._parallel.rank, models)
        return model

    def set_active_adapters(self, requests: set[Any], mapping: Any) -> None:
        if self._device.type == "cuda" and self.variant_cache.compute is None:
            self.variant_cache.compute = torch.cuda.current_stream(self._device)
        uids = {request.lora_int_id for request in requests} - self._dummies.keys()
        if uids:
            (uid,) = uids  # `turns` sees to it
            self.variant_cache.activate(uid)

    def remove_all_adapters(self) -> None:
        self._dummies.clear()


def _worker_class() -> Any:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    return Worker


class WholeModelWorker(_worker_class()):  # type: ignore[misc]  # which class depends on the platform
    """vLLM's worker, with this manager in the place of the one our plug-in has put there."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        import vllm.v1.worker.lora_model_runner_mixin as runners

        runners.LRUCacheWorkerLoRAManager = WholeModelManager
        super().load_model(*args, **kwargs)
