"""The interface that vLLM calls for adapters on a worker: our implementation of its worker LoRA manager.

vLLM (0.26 to 0.32) makes one manager per model runner and calls only the methods below, which keep vLLM's
names. vLLM's own LoRA layers, stacks and kernels are not used.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from vllm import envs

from profiler.checkpoint import read_model
from profiler.inside import confine
from workers.group import plan
from workers.kernels import copying, sparse_delta
from workers.patches.vllm import graph_choice, prompt_scoring
from workers.variant_config import VariantConfig, from_additional
from workers.variants import hooking, loader_threads, merged_slot, warming
from workers.variants.batch import Batch
from workers.variants.device import DeviceMemory, NoRoom
from workers.variants.kinds import open_variant
from workers.variants.layer_context import LayerContext, Workspace
from workers.variants.layer_weights import Contents
from workers.variants.layers import define_operators, tagged
from workers.variants.loader import Loader
from workers.variants.merged_product import PlainWeight
from workers.variants.operators import operations_for, operations_of, table_width
from workers.variants.shapes import LinearShape, VocabularyShape
from workers.variants.step_choice import StepChoice
from workers.variants.variant_cache import VariantCache

log = logging.getLogger(__name__)


class VariantManager:
    """vLLM's LoRA manager; `slots`, memory and kinds come from the configuration (`config.VariantConfig`)."""

    def __init__(self, vllm_config: Any, device: torch.device, embedding_modules: dict[str, str]) -> None:
        lora = vllm_config.lora_config
        self.config: VariantConfig = from_additional(
            vllm_config.additional_config, lora.max_loras, lora.max_lora_rank
        )
        self._device = torch.device(device)
        self._dtype: torch.dtype = vllm_config.model_config.dtype
        self._parallel = vllm_config.parallel_config
        self._dummies: dict[int, int] = {}
        self._all = operations_for(self.config.kinds)

    def create_lora_manager(self, model: torch.nn.Module, vllm_config: Any) -> torch.nn.Module:
        """Hook the model's layers and reserve memory for variants. Called once, after its weights were
        loaded.
        """
        define_operators(self._device.type)
        layers = hooking.find_layers(model)
        mergeable = self._mergeable(layers)
        self.batch = self._new_batch(vllm_config, mergeable)
        widths = {
            (shape.name, op): table_width(op, shape)
            for _, shape in layers
            for op in operations_of(shape)
            if op in self._all
        }
        memory = DeviceMemory(widths, self.config.slots, self._arena_bytes(), self._device)
        checkpoint = Path(vllm_config.model_config.model)
        if (group := plan.from_environment()) is not None and group.roots:
            confine((*map(Path, group.roots), checkpoint))
        base = functools.cache(lambda: read_model(checkpoint))  # for all variants

        def opener(folder: Path) -> Contents:
            return open_variant(folder, base(), self.config)

        shapes = [shape for _, shape in layers]
        threads = loader_threads.LoaderThreads(loader_threads.threads_for(self._parallel.world_size))
        self.variant_cache = VariantCache(
            opener, memory, shapes, self._dtype, self.config.host_bytes, threads
        )
        workspace = Workspace(self.config, self.batch.tokens.max_rows, 3, self._device)
        context = vllm_config.compilation_config.static_forward_context

        def register(module: Any, made: Any) -> None:
            context[tagged(module, self._device)] = made

        # A GPU's steps see moves in the order in which they are launched.
        layout = memory.layout if self._device.type == "cpu" else nullcontext()
        hooked: list[warming.Hooked] = []
        for module, shape in layers:
            tables = {op: memory.table((name, op)) for name, op in widths if name == shape.name}
            if tables:
                layer_context = LayerContext(self.batch, memory.arena, tables, workspace, layout)
                hooking.hook(module, shape, layer_context, register)
                hooked.append((module, shape, layer_context))
        prompt_scoring.follow(model, self.batch)
        slot = self._merged_slot(hooked, memory) if mergeable else None
        self._steps = StepChoice(self.variant_cache, slot)
        if self.config.merged_slot and not mergeable:
            log.warning(
                "no merged slot: this device cannot merge deltas, so its reserved memory stays unused"
            )
        graph_choice.follow(None if slot is None else self._steps.choose)
        if "lora" in self.config.kinds:
            copying.make_ready()
        if self._device.type == "cuda":
            warming.warm_up(hooked, self._dtype)
        self._loader = Loader.connect(self._parallel.rank, self.variant_cache)
        return model

    def _mergeable(self, layers: Sequence[hooking.Found]) -> bool:
        """Whether sparse deltas can be merged with some linear's weight.

        They are not merged if vLLM promises results that do not depend on the rest of the batch.
        """
        if "sparse_delta" not in self.config.kinds or envs.VLLM_BATCH_INVARIANT:
            return False
        return any(
            PlainWeight(module, shape).of(self._dtype) is not None
            for module, shape in layers
            if isinstance(shape, LinearShape)
            and sparse_delta.in_squares(shape.in_size, shape.widths, self._dtype)
        )

    def _merged_slot(
        self, hooked: Sequence[warming.Hooked], memory: DeviceMemory
    ) -> merged_slot.MergedSlot | None:
        if not self.config.merged_slot:
            return None
        tied = any(isinstance(shape, VocabularyShape) and shape.tied for _, shape, _ in hooked)
        if tied and self._parallel.pipeline_parallel_size > 1:
            log.warning("no merged slot: with a tied head, the stages could use different heads")
            return None
        return merged_slot.make(hooked, memory, self._dtype)

    def _new_batch(self, vllm_config: Any, merges: bool) -> Batch:
        limits = vllm_config.scheduler_config
        rows, sequences = limits.max_num_batched_tokens, limits.max_num_seqs
        return Batch(rows, sequences, self.config.slots, self._device, merges)

    def _arena_bytes(self) -> int:
        """This rank's part of a planned group: stages with fewer layers need less memory per variant."""
        group = plan.from_environment()
        return group.ranks[self._parallel.rank].variant_memory_bytes if group else self.config.arena_bytes

    # --- every step ----------------------------------------------------------------------------

    def set_active_adapters(self, requests: set[Any], mapping: Any) -> None:
        """Prepare the next forward pass, for this batch.

        `mapping` has a uid (0: base) for each row. `requests` may lack a request: vLLM treats requests with
        the same name as equal, whatever their uids.
        """
        uids = {*mapping.index_mapping, *mapping.prompt_mapping} - {0}
        for request in requests:
            if request.lora_int_id not in self._dummies:
                self._ensure(request.lora_int_id, request.lora_path, uids)
        self.variant_cache.begin_step(uids - self._dummies.keys())
        rows, samples = mapping.index_mapping, mapping.prompt_mapping
        if self._steps.put_weights({*rows, *samples} - self._dummies.keys()):
            self.batch.describe_as_base(len(rows), len(samples))
            return
        self.batch.describe(
            rows,
            samples,
            {uid: self._slot(uid) for uid in uids},
            self._operations(uids),
            self._sparse(uids),
        )

    def _slot(self, uid: int) -> int:
        return self._dummies[uid] if uid in self._dummies else self.variant_cache.slot_of[uid]

    def _operations(self, uids: set[int]) -> frozenset[str]:
        """The operations that the batch's variants need. Stand-ins need all: graphs are captured with
        them.
        """
        if uids & self._dummies.keys():
            return self._all
        return frozenset().union(*(self.variant_cache.operations_of[uid] for uid in uids)) & self._all

    def _sparse(self, uids: set[int]) -> list[int]:
        """The slots of variants that are sparse deltas; stand-ins are not."""
        cache = self.variant_cache
        real = uids - self._dummies.keys()
        return [cache.slot_of[uid] for uid in real if "sparse_delta" in cache.operations_of[uid]]

    def _ensure(self, uid: int, path: str, running: set[int]) -> None:
        """Check that a variant is in a slot. Under vLLM's own scheduler, place it into the next slot here."""
        if uid in self.variant_cache.slot_of:
            return
        if self._loader is not None:
            raise RuntimeError(f"variant {uid} was scheduled before it was in a slot")
        for slot in self._slots_to_try(running):
            try:
                self.variant_cache.place(uid, path, slot)
                return
            except NoRoom:
                continue
        raise RuntimeError(f"no room for variant {uid} in {self._arena_bytes()} bytes")

    def _slots_to_try(self, running: set[int]) -> list[int]:
        """Free slots, then those of variants that are not in this batch."""
        taken = self.variant_cache.slot_of
        free = [slot for slot in range(self.config.slots) if slot not in set(taken.values())]
        return [*free, *(slot for uid, slot in taken.items() if uid not in running)]

    # --- adding and removing -------------------------------------------------------------------

    def add_adapter(self, request: Any) -> bool:
        """Read a variant and check it. Raises ValueError if it cannot be served."""
        self.variant_cache.prepare(request.lora_int_id, request.lora_path)
        return True

    def remove_adapter(self, uid: int) -> bool:
        self.variant_cache.forget(uid)
        return True

    def pin_adapter(self, uid: int) -> bool:
        raise NotImplementedError(
            "variants cannot be pinned; the least recently used variant leaves its slot first"
        )

    def list_adapters(self) -> set[int]:
        return {*self.variant_cache.in_host(), *self.variant_cache.slot_of}

    # --- stand-ins, with which vLLM profiles, warms up and captures CUDA graphs ------------------

    @contextmanager
    def dummy_lora_cache(self) -> Iterator[None]:
        yield

    def add_dummy_lora(self, request: Any, rank: int) -> bool:
        self._dummies[request.lora_int_id] = request.lora_int_id - 1
        return True

    def remove_all_adapters(self) -> None:
        self._dummies.clear()
        self.batch.describe((), (), {}, frozenset())

    def get_dummy_lora_warmup_rank(self, default_rank: int) -> int:
        return default_rank

    @property
    def is_enabled(self) -> bool:
        return True

    def supports_tower_connector_lora(self) -> bool:
        return False
