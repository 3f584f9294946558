"""A batch in which some rows have merged weights gives what each row's own model gives; torch merges in the
place of the GPU's kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from kernels.sparse_delta.deltas import dense, load, random_delta

from workers.kernels import sparse_delta
from workers.kernels.rows import Run
from workers.kernels.sparse_delta import MERGED_FROM, Delta, Shape, merging
from workers.variants import merged_product, operators
from workers.variants.batch import Batch
from workers.variants.layer_context import LayerContext
from workers.variants.shapes import LinearShape, Slice

CPU = torch.device("cpu")
WIDTHS, INPUTS, SLOTS = (64, 128), 128, 3
SHAPE = LinearShape("l", tuple(Slice(f"p{i}", 0, w, w) for i, w in enumerate(WIDTHS)), 0, INPUTS, INPUTS)
SPARSE = frozenset({"sparse_delta"})


@pytest.fixture(autouse=True)
def squares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged_product, "in_squares", lambda *layer: True)


def made(
    uids: list[int], operations: frozenset[str] = SPARSE
) -> tuple[LayerContext, list[list[Delta | None]]]:
    """A layer with a delta of uid 7 in slot 0 and one of uid 8 in slot 2, and this batch."""
    random = np.random.default_rng(0)
    slots: list[list[Delta | None]]
    slots = [[random_delta(Shape(w, INPUTS, bits), random) for w in WIDTHS] for bits in (4, 4, 2)]
    arena, table = load(slots, squares=True)
    batch = Batch(len(uids), 4, SLOTS, CPU, largest_graph=8)
    batch.describe(uids, (), {7: 0, 8: 2}, operations, sparse=[0, 2])
    space = SimpleNamespace(merged=merging.Scratch(CPU, 100 * 4 * INPUTS))
    return LayerContext(batch, arena, dict.fromkeys(operations, table), cast(Any, space)), slots


@pytest.mark.parametrize("biased", [False, True])
def test_every_row_has_its_own_models_product(biased: bool) -> None:
    uids = [8, 0, *[7] * MERGED_FROM, 8, 7, 0, *[8] * (MERGED_FROM + 5), 7]
    context, slots = made(uids)
    weight, bias = torch.randn(sum(WIDTHS), INPUTS), torch.randn(sum(WIDTHS)) if biased else None
    x = torch.randn(len(uids), INPUTS)
    runs = merged_product.merged_runs(context, SHAPE, x.dtype)
    assert [run.slot for run in runs] == [0, 2]
    out = merged_product.product(x, weight, bias, runs, context, SHAPE)
    operators.add("sparse_delta", x, out, context, WIDTHS, but_merged=True)
    wholes = [torch.cat([dense(d) for d in slot if d is not None]) for slot in slots]
    models = {0: weight.double(), 7: weight + wholes[0], 8: weight + wholes[2]}
    want = torch.stack([models[uid] @ row for uid, row in zip(uids, x.double(), strict=True)])
    want = want if bias is None else want + bias
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4)


def test_more_rows_than_the_batch_tells_of_are_the_bases() -> None:
    context, _ = made([7] * MERGED_FROM)
    weight, x = torch.randn(sum(WIDTHS), INPUTS), torch.randn(MERGED_FROM + 3, INPUTS)
    out = merged_product.product(x, weight, None, context.batch.merged, context, SHAPE)
    torch.testing.assert_close(out[-3:], x[-3:] @ weight.T, rtol=1e-4, atol=1e-4)


def test_rotated_inputs_are_not_merged() -> None:
    uids = [7] * MERGED_FROM
    assert made(uids)[0].batch.merged == (Run(0, 0, MERGED_FROM),)
    context, _ = made(uids, SPARSE | {"boft"})
    assert merged_product.merged_runs(context, SHAPE, torch.float32) == ()


def test_nor_is_a_layer_whose_deltas_are_not_in_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged_product, "in_squares", sparse_delta.in_squares)
    context, _ = made([7] * MERGED_FROM)
    assert merged_product.merged_runs(context, SHAPE, torch.float32) == ()


def test_only_a_plain_weight_is() -> None:
    layer, rows = torch.nn.Module(), sum(WIDTHS)
    kept = merged_product.PlainWeight(layer, SHAPE)
    assert kept.of(torch.float32) is None
    for weight, plain in (
        (torch.randn(rows, INPUTS), True),
        (torch.randn(INPUTS, rows).T, False),
        (torch.randn(rows, INPUTS).half(), False),
        (torch.randn(rows, INPUTS // 2), False),
        (torch.zeros(rows, INPUTS, dtype=torch.uint8), False),
    ):
        layer.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))
        found = kept.of(torch.float32)
        assert (found is not None) == plain
        assert found is None or found.data_ptr() == weight.data_ptr()
