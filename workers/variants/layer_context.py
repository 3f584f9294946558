"""The things that every hook of a layer works on: the batch, the arena, its tables and scratch memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from workers.kernels import lora, svd_delta
from workers.variant_config import VariantConfig
from workers.variants.batch import Batch


class Workspace:
    """Scratch memory of the operations on a GPU; one layer uses it at a time."""

    def __init__(
        self,
        config: VariantConfig,
        max_tokens: int,
        max_slices: int,
        device: torch.device,
    ) -> None:
        rows = 1 if device.type == "cpu" else max_tokens  # the references need no scratch memory
        if "lora" in config.kinds:
            self.lora = lora.Scratch(rows, config.slots, max_slices * config.max_rank, device)
        if "svd_delta" in config.kinds:
            self.svd = svd_delta.Scratch(rows, config.max_svd_rank, device, max_slices)


@dataclass(frozen=True)
class LayerContext:
    """Everything a hook needs: the batch, the arena, and this layer's table for each operation.

    An operation that runs on the host holds `layout` (`DeviceMemory.layout`).
    """

    batch: Batch
    arena: torch.Tensor
    tables: Mapping[str, torch.Tensor]
    workspace: Workspace
    layout: AbstractContextManager[Any] = field(default_factory=nullcontext)

    def has(self, op: str) -> bool:
        return op in self.tables and op in self.batch.operations
