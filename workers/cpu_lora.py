"""LoRA arithmetic for vLLM on CPU: one product per variant in the batch, none for base rows.

vLLM's own (0.26 to 0.32) looks adapters up by slot for every token, and a row of the base has slot
-1, which Python reads as the LAST slot: base rows in a mixed batch got somebody else's adapter. It
also copies the adapter's weights once per token.
"""

from __future__ import annotations

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

BASE = -1


class CpuLora(PunicaWrapperCPU):  # type: ignore[misc]  # vLLM is untyped here
    """Same interface; `w_t_all` is [slots, 1, out, in], rows of `x` and `y` are tokens."""

    def _apply_shrink(self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float) -> None:
        y = y.view(-1, y.shape[-1])
        indices = self.token_lora_indices[: x.shape[0]]
        y[: x.shape[0]][indices == BASE] = 0
        for slot, rows in rows_by_slot(indices):
            weight = w_t_all[slot].squeeze(0).to(y.dtype)
            y[rows, : weight.shape[0]] = scale * (x[rows].to(y.dtype) @ weight.T)

    def _apply_expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        w_t_all: torch.Tensor,
        y_offset: int,
        y_slice_size: int,
        add_inputs: bool = True,
    ) -> None:
        columns = slice(y_offset, y_offset + y_slice_size)
        for slot, rows in rows_by_slot(self.token_lora_indices[: x.shape[0]]):
            weight = w_t_all[slot].squeeze(0).to(y.dtype)[:y_slice_size]
            update = x[rows].to(y.dtype) @ weight.T
            y[rows, columns] = y[rows, columns] + update if add_inputs else update


def rows_by_slot(indices: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """The token rows of each slot in use. `indices`: [tokens], slot of each row, -1 for the base."""
    slots = torch.unique(indices)
    return [(int(slot), (indices == slot).nonzero().squeeze(1)) for slot in slots if slot != BASE]
