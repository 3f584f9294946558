"""The Triton kernel, in its interpreter where there is no GPU, against float64."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from testkit.kernels.deltas import dense, expected, load, random_delta
from workers.kernels.rows import LARGE_FROM, Rows
from workers.kernels.sparse_delta import Delta, Shape

pytest.importorskip("triton")
from workers.kernels.sparse_delta import kernel

ON_GPU = torch.cuda.is_available() and os.environ["TRITON_INTERPRET"] != "1"
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = [torch.float16, torch.float32, torch.bfloat16]
WHOLE = kernel.Config(pairs=16, groups=16, rows=16, splits=1, warps=4, stages=2)
SPLIT = kernel.Config(pairs=16, groups=16, rows=8, splits=3, warps=4, stages=2)
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
INPUTS, SLICES = 104, (21, 34)

Slots = Sequence[Sequence[Delta | None]]


def _slots(count: int, inputs: int = INPUTS, seed: int = 0) -> Slots:
    """Deltas of mixed bits and scales; the second slot is empty, others may lack a slice."""
    random = np.random.default_rng(seed)
    found: list[list[Delta | None]] = []
    for slot in range(count):
        shapes = [
            Shape(w, inputs, (4, 2)[(slot + i) % 2], (1, 2)[slot // 3 % 2]) for i, w in enumerate(SLICES)
        ]
        deltas: list[Delta | None] = [random_delta(shape, random) for shape in shapes]
        if slot % 3 == 2:
            deltas[slot // 3 % 2] = None
        found.append([None, None] if slot == 1 else deltas)
    return found


def _check(
    slots: Slots,
    of_rows: Sequence[int],
    dtype: torch.dtype,
    config: kernel.Config | None = None,
    padding: int = 0,
    inputs: int = INPUTS,
) -> None:
    arena, table = load(slots, DEVICE)
    num_rows = len(of_rows) + padding
    rows = Rows(max(num_rows, LARGE_FROM), len(slots), DEVICE)
    rows.update(np.array(of_rows, np.int32))
    torch.manual_seed(0)
    x = torch.randn(num_rows, inputs).to(DEVICE, dtype)
    x[len(of_rows) :] = torch.nan
    before = torch.randn(num_rows, sum(SLICES)).to(DEVICE, dtype)
    out = before.clone()
    kernel.apply(x, out, arena, table, rows, SLICES, config)
    want = expected(x, before, slots, np.array(of_rows), SLICES)
    error = (out.double() - want).norm(dim=1) / want.norm(dim=1)
    assert float(error.max()) < TOLERANCE[dtype]
    for row in range(num_rows):
        if row >= len(of_rows) or of_rows[row] < 0 or not any(slots[of_rows[row]]):
            assert torch.equal(out[row], before[row])


@pytest.mark.parametrize(
    "dtype", [DTYPES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in DTYPES[1:])]
)
@pytest.mark.parametrize("config", [WHOLE, pytest.param(SPLIT, marks=pytest.mark.slow)])
def test_mixed_batches_equal_the_reference(dtype: torch.dtype, config: kernel.Config) -> None:
    _check(_slots(5), [3, 0, -1, 1, 4, 2, 0, *[2] * 18], dtype, config, padding=3)


@pytest.mark.parametrize(
    "of_rows",
    [[0], [-1, -1, -1], *(pytest.param(each, marks=pytest.mark.slow) for each in ([0] * 17, [0, 2, 3, 4]))],
)
def test_batches_of_one_kind_equal_the_reference(of_rows: list[int]) -> None:
    _check(_slots(5), of_rows, torch.float16, SPLIT)


@pytest.mark.parametrize("inputs", [8, 64, pytest.param(576, marks=pytest.mark.slow)])
def test_any_number_of_inputs_equals_the_reference(inputs: int) -> None:
    slots = [
        [random_delta(Shape(width, inputs, bits), np.random.default_rng(0)) for width in SLICES]
        for bits in (2, 4)
    ]
    _check(slots, [1, 0, -1], torch.float32, inputs=inputs)


def _small_deltas(count: int, inputs: int = 16) -> Slots:
    random = np.random.default_rng(0)
    return [[random_delta(Shape(width, inputs, 4), random) for width in SLICES] for _ in range(count)]


@pytest.mark.slow
def test_large_tiles_equal_the_reference() -> None:
    """A batch of one variant with a prefill's rows and two variants that decode."""
    of_rows = [0] * 70 + [-1] * (LARGE_FROM - 91) + [2] * 10 + [1] + [2] * 10
    _check(_small_deltas(3), of_rows, torch.float16, kernel.Config(32, 16, 16, 1, 4, 2), inputs=16)


@pytest.mark.slow
def test_a_decoding_row_does_not_depend_on_a_prefill_in_its_batch() -> None:
    """In a step of many rows a variant with few is cut as in a step that only decodes: to the bit."""
    arena, table = load(_small_deltas(2), DEVICE)
    x = torch.randn(3, 16, device=DEVICE, dtype=torch.float16)
    results = []
    for others in (0, LARGE_FROM):
        rows = Rows(LARGE_FROM + 3, 2, DEVICE)
        rows.update(np.array([*[0] * others, 1, 1, 1], np.int32))
        inputs = torch.cat((torch.randn(others, 16, device=DEVICE).half(), x))
        out = torch.ones(len(inputs), sum(SLICES), device=DEVICE, dtype=torch.float16)
        kernel.apply(inputs, out, arena, table, rows, SLICES, None if ON_GPU else WHOLE)
        results.append(out[-3:])
    assert torch.equal(*results)


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_batch() -> None:
    slots = _slots(4)
    arena, table = load(slots, DEVICE)
    x = torch.randn(1, INPUTS, device=DEVICE, dtype=torch.float16)
    results = []
    # On a GPU also as configured: one order of sums for all sizes of a decoding batch.
    for others in ([], [0, -1, 2, 3, 3], [3] * (40 if ON_GPU else 12)):
        rows = Rows(64, 4, DEVICE)
        rows.update(np.array([*others, 3], np.int32))
        inputs = torch.cat((torch.randn(len(others), INPUTS, device=DEVICE).half(), x))
        out = torch.ones(len(inputs), sum(SLICES), device=DEVICE, dtype=torch.float16)
        kernel.apply(inputs, out, arena, table, rows, SLICES, None if ON_GPU else SPLIT)
        results.append(out[-1])
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.slow
def test_sums_never_read_memory_that_was_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: plain(*a, **k).fill_(torch.nan))
    _check(_slots(3), [0, 2, 2, -1], torch.float32, SPLIT)


@pytest.mark.skipif(not ON_GPU, reason="PTX runs on a GPU only")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_registers_hold_what_plain_triton_computes(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    slots = [[random_delta(Shape(width, 4096, bits), random) for width in SLICES] for bits in (2, 4)]
    arena, table = load(slots, DEVICE)
    rows = Rows(8, 2, DEVICE)
    rows.update(np.array([0, 1, 1, 0, -1], np.int32))
    x = torch.randn(5, 4096, device=DEVICE, dtype=dtype)
    found = []
    for fast in (kernel.HALF_DTYPES, ()):
        monkeypatch.setattr(kernel, "HALF_DTYPES", fast)
        found.append(torch.zeros(5, sum(SLICES), device=DEVICE, dtype=dtype))
        kernel.apply(x, found[-1], arena, table, rows, SLICES)
    assert torch.equal(*found)
    assert (
        float(
            found[0][1]
            .double()
            .sub(torch.cat([dense(d) for d in slots[1]]).to(DEVICE) @ x[1].double())
            .abs()
            .max()
        )
        < 1
    )
