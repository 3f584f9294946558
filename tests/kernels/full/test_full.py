"""Replaced norms, embeddings and heads: in torch, and in Triton (its interpreter where there is no GPU)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import pytest
import torch

from workers.kernels import full
from workers.kernels.full import reference
from workers.kernels.rows import Rows
from workers.kernels.types import offsets, total_bytes, views

ON_GPU = torch.cuda.is_available() and os.environ["TRITON_INTERPRET"] != "1"
OF_ROWS = np.array([2, -1, 0, 1, 2, *[0] * 17], np.int32)
WIDTH, FIRST = 40, 100


def _triton() -> ModuleType:
    pytest.importorskip("triton")
    from workers.kernels.full import kernel

    return kernel


@pytest.fixture(params=["torch", "triton"])
def operations(request: pytest.FixtureRequest) -> ModuleType:
    return reference if request.param == "torch" else _triton()


def _device(operations: ModuleType) -> torch.device:
    return torch.device("cuda" if ON_GPU and operations is not reference else "cpu")


def _load(tensors: Sequence[torch.Tensor | None], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Arena and table of one tensor a slot; the memory between them is poisoned."""
    arena = torch.full((1 << 16,), 0xFF, dtype=torch.uint8)
    table: list[tuple[int, ...]] = []
    start = 128
    for tensor in tensors:
        if tensor is None:
            table.append((0, 0))
            continue
        count = 1 if tensor.ndim == 1 else len(tensor)
        parts = full.parts(count, tensor.shape[-1], tensor.dtype)
        full.pack(tensor, views(arena, parts, start))
        table.append(full.describe(count, offsets(parts, start)))
        start += total_bytes(parts)
    return arena.to(device), torch.tensor(table, device=device)


def _rows(device: torch.device) -> Rows:
    rows = Rows(32, 3, device)
    rows.update(OF_ROWS)
    return rows


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms(operations: ModuleType, dtype: torch.dtype, zero_centred: bool) -> None:
    device = _device(operations)
    weights = [torch.randn(WIDTH).to(dtype), None, torch.zeros(WIDTH, dtype=dtype)]
    x = 3 * torch.randn(24, WIDTH).to(device, dtype)  # two rows of padding
    before = torch.randn(24, WIDTH).to(device, dtype)
    out = before.clone()
    operations.norm(x, out, 1e-5, *_load(weights, device), _rows(device), zero_centred)
    exact = x.double() * torch.rsqrt(x.double().square().mean(dim=1, keepdim=True) + 1e-5)
    for row, slot in enumerate([*OF_ROWS, -1, -1]):
        weight = weights[slot] if slot >= 0 else None
        if weight is None:
            assert torch.equal(out[row], before[row])
        else:
            want = exact[row] * (weight.to(device).double() + zero_centred)
            torch.testing.assert_close(out[row].double(), want, rtol=3e-3, atol=1e-5)


def test_embeddings(operations: ModuleType) -> None:
    device = _device(operations)
    tensors = [torch.randn(7, WIDTH), None, torch.randn(9, WIDTH)]
    before = torch.randn(24, WIDTH).to(device)
    out = before.clone()
    ids = torch.arange(FIRST - 3, FIRST + 21).to(device)
    operations.embed(ids, out, FIRST, *_load(tensors, device), _rows(device))
    for row, slot in enumerate([*OF_ROWS, -1, -1]):
        tensor = tensors[slot] if slot >= 0 else None
        local = int(ids[row]) - FIRST
        want = tensor[local] if tensor is not None and 0 <= local < len(tensor) else None
        assert torch.equal(out[row].cpu(), before[row].cpu() if want is None else want)


def test_an_embedding_outside_of_the_arena(operations: ModuleType) -> None:
    """In page-locked memory of the host, before or behind the arena as it may be."""
    device = _device(operations)
    tensors = [torch.randn(9, WIDTH) for _ in range(3)]
    away = [tensor.pin_memory() if ON_GPU else tensor for tensor in tensors]
    arena = torch.zeros(128, dtype=torch.uint8, device=device)
    table = torch.tensor([[9, tensor.data_ptr() - arena.data_ptr()] for tensor in away], device=device)
    before = torch.randn(24, WIDTH).to(device)
    out = before.clone()
    ids = (torch.arange(24) % 9).to(device)
    operations.embed(ids, out, 0, arena, table, _rows(device))
    for row, slot in enumerate([*OF_ROWS, -1, -1]):
        want = before[row].cpu() if slot < 0 else tensors[slot][row % 9]
        assert torch.equal(out[row].cpu(), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_heads(operations: ModuleType, dtype: torch.dtype) -> None:
    device = _device(operations)
    tensors = [torch.randn(70, WIDTH).to(dtype), None, torch.randn(70, WIDTH).to(dtype)]
    x = torch.randn(24, WIDTH).to(device, dtype)
    x[22:] = torch.nan
    before = torch.randn(24, 70).to(device, dtype)
    out = before.clone()
    operations.head(x, out, *_load(tensors, device), _rows(device))
    for row, slot in enumerate([*OF_ROWS, -1, -1]):
        tensor = tensors[slot] if slot >= 0 else None
        if tensor is None:
            assert torch.equal(out[row], before[row])
        else:
            want = tensor.to(device).double() @ x[row].double()
            torch.testing.assert_close(out[row].double(), want, rtol=2e-3, atol=2e-2)


def test_a_packages_functions_choose_by_device_and_refuse_what_does_not_fit() -> None:
    cpu = torch.device("cpu")
    arena, table = _load([torch.ones(4), None, None], cpu)
    out = torch.zeros(22, 4)
    full.norm(torch.ones(22, 4), out, 0.0, arena, table, _rows(cpu))
    assert torch.equal(out[2], torch.ones(4))
    with pytest.raises(ValueError, match="expected the same"):
        full.norm(torch.ones(2, 4), torch.ones(2, 5), 0.0, arena, table, _rows(cpu))
    with pytest.raises(ValueError, match="ids into"):
        full.embed(torch.ones(3), torch.ones(2, 4), 0, arena, table, _rows(cpu))
    with pytest.raises(ValueError, match="A head of"):
        full.head(torch.ones(3, 4), torch.ones(2, 9), arena, table, _rows(cpu))
    with pytest.raises(ValueError, match="table of 1 columns"):
        full.head(torch.ones(2, 4), torch.ones(2, 9), arena, table[:, :1], _rows(cpu))
