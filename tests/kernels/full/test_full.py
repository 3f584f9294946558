"""Replaced norms, embeddings and heads, whole or as differences: in torch, and in Triton (its interpreter
where there is no GPU)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest
import torch

import workers.kernels.rows
from workers.kernels import full
from workers.kernels.full import reference
from workers.kernels.rows import Rows
from workers.kernels.types import Part, offsets, total_bytes, views

ON_GPU = torch.cuda.is_available() and os.environ["TRITON_INTERPRET"] != "1"
OF_ROWS = np.array([2, -1, 0, 1, 2, *[0] * 17], np.int32)
WIDTH, FIRST = 40, 100
# The interpreter has no product in bfloat16.
MULTIPLIED = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]


def _triton() -> ModuleType:
    pytest.importorskip("triton")
    from workers.kernels.full import kernel

    return kernel


@pytest.fixture(params=["torch", "triton"])
def operations(request: pytest.FixtureRequest) -> ModuleType:
    return reference if request.param == "torch" else _triton()


def _device(operations: ModuleType) -> torch.device:
    return torch.device("cuda" if ON_GPU and operations is not reference else "cpu")


@dataclass(frozen=True)
class Change:
    """A difference: codes int8 [rows, K] and scales float32 [rows]."""

    codes: torch.Tensor
    scales: torch.Tensor

    def exact(self) -> torch.Tensor:
        return self.codes.double() * self.scales.double()[:, None]


def _change(rows: int) -> Change:
    """Every code of eight bits is there, the two largest in the first row."""
    codes = torch.randint(-128, 128, (rows, WIDTH), dtype=torch.int8)
    codes[0, :2] = torch.tensor([-128, 127])
    return Change(codes, 0.01 * (1 + torch.rand(rows)))


def _load(
    tensors: Sequence[torch.Tensor | Change | None], device: torch.device, size: int = 1 << 16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arena and table of one tensor a slot; the memory between them is poisoned."""
    arena = torch.full((size,), 0xFF, dtype=torch.uint8)
    table: list[tuple[int, ...]] = []
    start = 128
    for tensor in tensors:
        if tensor is None:
            table.append((0, 0, 0))
            continue
        row, parts = _put(tensor, arena, start)
        table.append(row)
        start += total_bytes(parts)
    return arena.to(device), torch.tensor(table, device=device)


def _put(
    tensor: torch.Tensor | Change, arena: torch.Tensor, start: int
) -> tuple[tuple[int, ...], tuple[Part, ...]]:
    if isinstance(tensor, Change):
        count = len(tensor.codes)
        two = full.difference_parts(count, tensor.codes.shape[1])
        full.pack_difference(tensor.codes, tensor.scales, views(arena, two, start))
        return full.describe_difference(count, offsets(two, start)), two
    count = 1 if tensor.ndim == 1 else len(tensor)
    parts = full.parts(count, tensor.shape[-1], tensor.dtype)
    full.pack(tensor, views(arena, parts, start))
    return full.describe(count, offsets(parts, start)), parts


def _rows(device: torch.device) -> Rows:
    rows = Rows(32, 3, device)
    rows.update(OF_ROWS)
    return rows


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms_equal_the_reference(operations: ModuleType, dtype: torch.dtype, zero_centred: bool) -> None:
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


def test_embeddings_equal_the_reference(operations: ModuleType) -> None:
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
    table = torch.tensor([[9, tensor.data_ptr() - arena.data_ptr(), 0] for tensor in away], device=device)
    before = torch.randn(24, WIDTH).to(device)
    out = before.clone()
    ids = (torch.arange(24) % 9).to(device)
    operations.embed(ids, out, 0, arena, table, _rows(device))
    for row, slot in enumerate([*OF_ROWS, -1, -1]):
        want = before[row].cpu() if slot < 0 else tensors[slot][row % 9]
        assert torch.equal(out[row].cpu(), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_differences_of_embeddings_equal_the_reference(operations: ModuleType, dtype: torch.dtype) -> None:
    """The variant's tensor replaces a part, and another is whole; ids below and behind this rank's shard
    stay."""
    device = _device(operations)
    changes = [_change(7), None, torch.randn(9, WIDTH).to(dtype)]
    before = torch.randn(24, WIDTH).to(device, dtype)
    out = before.clone()
    ids = torch.arange(FIRST - 3, FIRST + 21).to(device)
    operations.embed(ids, out, FIRST, *_load(changes, device), _rows(device))
    seen = set()
    for row, slot in enumerate([*OF_ROWS, -1, -1]):
        change, local = changes[slot] if slot >= 0 else None, int(ids[row]) - FIRST
        seen.add((type(change), change is not None and 0 <= local < len(getattr(change, "codes", change))))
        if isinstance(change, Change) and 0 <= local < 7:
            want = (before[row].cpu().double() + change.exact()[local]).to(dtype)
            torch.testing.assert_close(out[row].cpu(), want, rtol=torch.finfo(dtype).eps, atol=1e-6)
            assert not torch.equal(out[row], before[row])
        elif isinstance(change, torch.Tensor) and 0 <= local < 9:
            assert torch.equal(out[row].cpu(), change[local])
        else:
            assert torch.equal(out[row], before[row])
    assert {(Change, True), (Change, False), (torch.Tensor, True), (type(None), False)} <= seen


def test_a_difference_of_an_embedding_outside_of_the_arena(operations: ModuleType) -> None:
    device = _device(operations)
    changes, arena = [_change(9) for _ in range(3)], torch.zeros(128, dtype=torch.uint8, device=device)
    away = [[c.pin_memory() if ON_GPU else c for c in (change.codes, change.scales)] for change in changes]
    table = torch.tensor([[9, *(p.data_ptr() - arena.data_ptr() for p in two)] for two in away]).to(device)
    before = torch.randn(24, WIDTH).to(device)
    out = before.clone()
    operations.embed((torch.arange(24) % 9).to(device), out, 0, arena, table, _rows(device))
    for row, slot in enumerate([*OF_ROWS, -1, -1]):
        want = before[row].cpu().double() + (changes[slot].exact()[row % 9] if slot >= 0 else 0)
        torch.testing.assert_close(out[row].cpu().double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", MULTIPLIED)
def test_differences_of_heads_equal_the_reference(operations: ModuleType, dtype: torch.dtype) -> None:
    """The result is added to the output of the base's head, in a batch with a head that is whole."""
    device = _device(operations)
    change, whole = _change(70), torch.randn(70, WIDTH).to(dtype)
    x = torch.randn(24, WIDTH).to(device, dtype)
    x[22:] = torch.nan
    before = torch.randn(24, 75).to(device, dtype)  # its last outputs are padding
    out = before.clone()
    operations.head(x, out, *_load([change, None, whole], device), _rows(device))
    relative, absolute = 2 * torch.finfo(dtype).eps, 2e-2 if dtype != torch.float32 else 1e-4

    def assert_close(found: torch.Tensor, want: torch.Tensor) -> None:
        torch.testing.assert_close(found.cpu().double(), want, rtol=relative, atol=absolute)

    for row, slot in enumerate([*OF_ROWS, -1, -1]):
        assert torch.equal(out[row, 70:], before[row, 70:])
        exact = x[row].cpu().double()
        match slot:
            case 0:
                want = before[row, :70].cpu().double() + change.exact() @ exact
                assert_close(out[row, :70], want)
                assert not torch.equal(out[row], before[row])
            case 2:
                assert_close(out[row, :70], whole.double() @ exact)
            case _:
                assert torch.equal(out[row], before[row])


@pytest.mark.parametrize("differs", [True, False])
@pytest.mark.parametrize("rows", [5, 600])
def test_heads_of_many_inputs_and_rows(operations: ModuleType, rows: int, differs: bool) -> None:
    """Several blocks of inputs, the last of them cut, in small tiles and in large ones."""
    device, wide = _device(operations), 300
    change = Change(torch.randint(-128, 128, (70, wide), dtype=torch.int8), 0.01 * (1 + torch.rand(70)))
    x, before = torch.randn(rows, wide), torch.randn(rows, 70)
    whole = torch.randn(70, wide)
    held = Rows(rows, 2, device)
    held.update(np.arange(rows, dtype=np.int32) % 2 - 1)  # every other row is the base's
    arena, table = _load([change if differs else whole, None], device, 1 << 18)
    out = before.clone().to(device)
    operations.head(x.to(device), out, arena, table, held)
    want = before.double() + x.double() @ change.exact().T if differs else x.double() @ whole.double().T
    torch.testing.assert_close(out[1::2].cpu().double(), want[1::2], rtol=1e-4, atol=1e-3)
    assert torch.equal(out[::2].cpu(), before[::2])


def test_a_row_of_a_head_has_the_same_bits_in_batch_invariant_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel, wide = _triton(), 300
    device = _device(kernel)
    monkeypatch.setattr(kernel, "batch_invariant", lambda: True)
    monkeypatch.setattr(workers.kernels.rows, "batch_invariant", lambda: True)
    arena, table = _load([torch.randn(70, wide), None], device, 1 << 18)
    x = torch.randn(600, wide).to(device)
    outs = []
    for rows in (5, 600):
        held = Rows(rows, 2, device)
        held.update(np.zeros(rows, np.int32))
        outs.append(torch.zeros(rows, 70, device=device))
        kernel.head(x[:rows], outs[-1], arena, table, held)
    assert torch.equal(outs[0], outs[1][:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_added_differences_equal_the_reference(operations: ModuleType, dtype: torch.dtype) -> None:
    device, change = _device(operations), _change(33)
    base = torch.randn(33, WIDTH).to(dtype)
    out = torch.full_like(base, torch.nan).to(device)
    operations.add(base.to(device), change.codes.to(device), change.scales.to(device), out)
    want = (base.double() + change.exact()).to(dtype)
    torch.testing.assert_close(out.cpu(), want, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_heads_equal_the_reference(operations: ModuleType, dtype: torch.dtype) -> None:
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
    with pytest.raises(ValueError, match="input and output of the same shape"):
        full.norm(torch.ones(2, 4), torch.ones(2, 5), 0.0, arena, table, _rows(cpu))
    with pytest.raises(ValueError, match="expected ids"):
        full.embed(torch.ones(3), torch.ones(2, 4), 0, arena, table, _rows(cpu))
    with pytest.raises(ValueError, match="expected a head's inputs"):
        full.head(torch.ones(3, 4), torch.ones(2, 9), arena, table, _rows(cpu))
    with pytest.raises(ValueError, match="expected codes, base and outputs"):
        full.add(torch.ones(2, 4), torch.ones(2, 5), torch.ones(2), torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"a table of .* got 1"):
        full.head(torch.ones(2, 4), torch.ones(2, 9), arena, table[:, :1], _rows(cpu))
