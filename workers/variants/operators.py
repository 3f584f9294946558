"""The operations by name, as the layers call them and the tables are sized for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from workers.kernels import lora
from workers.kernels.lora import layout as lora_layout
from workers.variants.config import VariantConfig
from workers.variants.shapes import LayerShape, LinearShape

if TYPE_CHECKING:
    from workers.variants.layers import Site

# Operations that add to a linear layer's output, in this order.
ADDITIONS = ("lora",)
LINEAR = (*ADDITIONS,)
_OF_KIND = {
    "lora": ("lora",),
    "sparse_delta": (),
    "svd_delta": (),
    "boft": (),
}


def operations_for(kinds: Iterable[str]) -> frozenset[str]:
    """All operations that variants of these kinds may need."""
    return frozenset(op for kind in kinds for op in _OF_KIND[kind])


def table_width(op: str, shape: LayerShape) -> int:
    """Columns of an operation's table for such a layer."""
    slices = len(shape.slices) if isinstance(shape, LinearShape) else 1
    return _WIDTHS[op](slices)


_WIDTHS: dict[str, Callable[[int], int]] = {"lora": lora_layout.width}


class Workspace:
    """Scratch memory of the operations; one layer uses it at a time."""

    def __init__(
        self, config: VariantConfig, max_tokens: int, most_slices: int, device: torch.device
    ) -> None:
        self.lora = lora.Scratch(max_tokens, config.slots, most_slices * config.max_rank, device)


def add(op: str, x: torch.Tensor, out: torch.Tensor, site: Site, widths: tuple[int, ...]) -> None:
    """out [T, O] += what `op` makes of x [T, K], on the rows of variants."""
    rows, space = site.batch.tokens, site.workspace
    match op:
        case "lora":
            lora.apply(x, out, site.arena, site.tables[op], rows, widths, space.lora)
