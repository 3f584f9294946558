"""Replaced biases: in torch, and in Triton (its interpreter where there is no GPU)."""

from __future__ import annotations

import os
from types import ModuleType

import numpy as np
import pytest
import torch

from workers.kernels import bias
from workers.kernels.bias import reference
from workers.kernels.rows import Rows
from workers.kernels.types import offsets, total_bytes, views

ON_GPU = torch.cuda.is_available() and os.environ["TRITON_INTERPRET"] != "1"
OF_ROWS = np.array([1, -1, 0, 1, 2], np.int32)
PARTS = (7, 5, 1030)  # of a product; the last one takes more than one program


@pytest.fixture(params=["torch", "triton"])
def operations(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "torch":
        return reference
    pytest.importorskip("triton")
    from workers.kernels.bias import kernel

    return kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_a_part_without_a_bias_of_the_variant_keeps_what_it_has(
    operations: ModuleType, biased: bool, dtype: torch.dtype
) -> None:
    """Slot 0 replaces all parts, slot 1 the middle one, slot 2 none."""
    device = torch.device("cuda" if ON_GPU and operations is not reference else "cpu")
    width = sum(PARTS)
    own = [torch.randn(width), torch.randn(width)]
    replaced = torch.zeros(2, width, dtype=torch.bool)
    replaced[0], replaced[1, PARTS[0] : PARTS[0] + PARTS[1]] = True, True
    layout = bias.parts(width)
    size = -(-total_bytes(layout) // 128) * 128
    arena = torch.full((2 * size + 128,), 0xFF, dtype=torch.uint8)
    table = []
    for slot in range(2):
        at = offsets(layout, 128 + slot * size)
        bias.pack(
            torch.where(replaced[slot], own[slot], bias.kept(width)),
            views(arena, layout, 128 + slot * size),
        )
        table.append(bias.describe(at))
    table.append((0, 0))
    base = torch.randn(width).to(device, dtype) if biased else None
    before = torch.randn(len(OF_ROWS), width).to(device, dtype)
    out = before.clone()
    rows = Rows(len(OF_ROWS), 3, device)
    rows.update(OF_ROWS)
    operations.apply(out, base, arena.to(device), torch.tensor(table, device=device), rows)
    expected = before.double().cpu()
    for row, slot in enumerate(OF_ROWS):
        if slot in (0, 1):
            change = own[slot].double() - (0 if base is None else base.double().cpu())
            expected[row] += torch.where(replaced[slot], change, 0.0)
    close = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double().cpu(), expected, rtol=close, atol=close)
    assert torch.equal(out[0].cpu()[~replaced[1]], before[0].cpu()[~replaced[1]])
    assert torch.equal(out[[1, 4]], before[[1, 4]])
