"""The Triton kernels, in their interpreter where there is no GPU, against float64."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from testkit.kernels.rotations import expected, load, random_rotation
from workers.kernels import rows as rows_module
from workers.kernels.boft import Rotation
from workers.kernels.rows import Rows

pytest.importorskip("triton")
from workers.kernels.boft import kernel, reference

ON_GPU = torch.cuda.is_available() and os.environ["TRITON_INTERPRET"] != "1"
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = [torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
KINDS = [(1, 32), (2, 48), (3, 8), (1, 2), (1, 6)]


def _check(
    slots: list[list[Rotation | None]],
    of_rows: list[int],
    inputs: int,
    dtype: torch.dtype,
    window: tuple[int, int] | None = None,
    max_factors: int = 5,
) -> None:
    start, size = window or (0, inputs)
    arena, table = load(slots, dtype, DEVICE)
    rows = Rows(len(of_rows) + 2, len(slots), DEVICE)
    rows.update(np.array(of_rows, np.int32))
    x = torch.randn(len(of_rows) + 2, inputs).to(DEVICE, dtype)  # two rows of padding
    into = torch.full((len(slots[0]), len(x), size), torch.nan, dtype=dtype, device=DEVICE)
    kernel.rotate(x, into, arena, table, rows, start, max_factors)
    want = expected(x, slots, np.array(of_rows))[:, :, start : start + size]
    torch.testing.assert_close(into.double().cpu(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for i, slot in enumerate([*of_rows, -1, -1]):
        if slot < 0 or not any(slots[slot]):
            assert torch.equal(into[:, i], x[i, start : start + size].expand(len(into), size))


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: plain(*a, **k).fill_(torch.nan))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_adapters_of_all_kinds_in_one_launch(dtype: torch.dtype) -> None:
    inputs = 96
    slots: list[list[Rotation | None]] = [[random_rotation(inputs, 1, m, b, dtype), None] for m, b in KINDS]
    slots[3][1] = random_rotation(inputs, 1, 2, 4, dtype)
    slots.append([None, None])
    _check(slots, [*range(len(slots)), -1, 2, -1], inputs, dtype)


@pytest.mark.parametrize(
    "of_rows", [[0], pytest.param([0] * 17, marks=pytest.mark.slow), [1, 0, 1], [-1, -1]]
)
def test_batches_of_one_kind_equal_the_reference(of_rows: list[int]) -> None:
    slots: list[list[Rotation | None]] = [[random_rotation(64, 1, 2, 32, torch.float16)], [None]]
    _check(slots, of_rows, 64, torch.float16, max_factors=2)


USUAL = [(1, 32), (2, 32), (3, 32), (1, 16), (2, 16), (1, 64), (2, 64)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_the_usual_sizes_over_more_columns_than_a_program_takes(dtype: torch.dtype) -> None:
    """The rows do not fill the last tile; a row's result does not depend on other rows."""
    inputs = 384
    slots: list[list[Rotation | None]] = [[random_rotation(inputs, 1, m, b, dtype), None] for m, b in USUAL]
    _check(slots, [*range(len(slots)), 3, 3, -1, 1, 0], inputs, dtype)


def test_a_rows_result_does_not_depend_on_how_many_there_are() -> None:
    dtype, inputs = torch.bfloat16, 128
    slots: list[list[Rotation | None]] = [[random_rotation(inputs, 1, 2, 32, dtype)]]
    arena, table = load(slots, dtype, DEVICE)
    x, found = torch.randn(9, inputs).to(DEVICE, dtype), []
    for count in (1, 9):
        rows, into = Rows(count, 1, DEVICE), torch.empty(1, count, inputs, dtype=dtype, device=DEVICE)
        rows.update(np.zeros(count, np.int32))
        kernel.rotate(x[:count], into, arena, table, rows, 0, 2)
        found.append(into[0, 0])
    assert torch.equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize("window", [(40, 50), (127, 1)])
def test_a_window_of_columns_equals_the_reference(window: tuple[int, int]) -> None:
    slots: list[list[Rotation | None]] = [
        [random_rotation(128, 1, m, b, torch.float32)] for m, b in ((2, 32), (1, 128))
    ]
    _check(slots, [0, 1, -1], 128, torch.float32, window)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [(2, 8), (2, 32), (1, 64)])
def test_large_tiles_equal_the_reference(monkeypatch: pytest.MonkeyPatch, kind: tuple[int, int]) -> None:
    monkeypatch.setattr(rows_module, "LARGE_FROM", 70)
    slots: list[list[Rotation | None]] = [[random_rotation(64, 1, *kind, torch.float16)] for _ in range(2)]
    _check(slots, [0] * 66 + [-1] * 4 + [1] * 3, 64, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("with_bias", [False, True])
def test_rescaled_rows_equal_the_reference(dtype: torch.dtype, with_bias: bool) -> None:
    slices = (20, 7)
    last = random_rotation(8, 7, 1, 4, dtype)
    slots: list[list[Rotation | None]] = [
        [random_rotation(8, 20, 1, 4, dtype, biased=True), None],
        [None, None],
        [None, last],
    ]
    arena, table = load(slots, dtype, DEVICE)
    rows = Rows(16, 3, DEVICE)
    rows.update(np.array([2, 0, -1, 1], np.int32))
    before = torch.randn(5, 27).to(DEVICE, dtype)
    bias = torch.randn(27).to(DEVICE, dtype) if with_bias else None
    got, want = before.clone(), before.clone().cpu()
    kernel.rescale(got, bias, arena, table, rows, slices)
    reference.rescale(want, None if bias is None else bias.cpu(), arena.cpu(), table.cpu(), rows, slices)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1e-3)
    assert torch.equal(got[2:], before[2:])
    base = 0 if bias is None else bias[20:].double().cpu()
    expected = (before[0, 20:].double().cpu() - base) * last.scale + base
    torch.testing.assert_close(got[0, 20:].double().cpu(), expected, rtol=2e-3, atol=2e-3)
