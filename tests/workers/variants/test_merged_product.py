"""A batch in which some rows have merged weights gives what each row's own model gives; torch merges in the
place of the GPU's kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from testkit.kernels.deltas import dense, load, random_delta
from workers.kernels import sparse_delta
from workers.kernels.rows import LARGE_FROM, Run
from workers.kernels.sparse_delta import Delta, Shape
from workers.variants import merged_product, operators
from workers.variants.batch import Batch
from workers.variants.layer_context import LayerContext
from workers.variants.shapes import LinearShape, Slice

CPU = torch.device("cpu")
WIDTHS, INPUTS, SLOTS = (64, 128), 128, 3
LONG, PADDING = LARGE_FROM, 20
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
    batch = Batch(len(uids) + PADDING, 4, SLOTS, CPU, merges=True)
    batch.describe(uids, (), {7: 0, 8: 2}, operations, sparse=[0, 2])
    return LayerContext(batch, arena, dict.fromkeys(operations, table), cast(Any, SimpleNamespace())), slots


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("padding", [0, PADDING])
def test_every_row_has_its_own_models_product(biased: bool, padding: int) -> None:
    """Rows beyond the batch in a larger graph are zero."""
    uids = [8, 0, *[7] * LONG, 8, 7, 0, *[8] * (LONG + 5), 7]
    context, slots = made(uids)
    weight, bias = torch.randn(sum(WIDTHS), INPUTS), torch.randn(sum(WIDTHS)) if biased else None
    x = torch.randn(len(uids) + padding, INPUTS)
    cut = merged_product.tiles(context, SHAPE, x)
    assert cut is not None
    assert [run.slot for run in context.batch.merged] == [0, 2]
    out = merged_product.product(x, weight, bias, cut, context, SHAPE)
    operators.add("sparse_delta", x, out, context, WIDTHS, but_merged=True)
    wholes = [torch.cat([dense(d) for d in slot if d is not None]) for slot in slots]
    models = {0: weight.double(), 7: weight + wholes[0], 8: weight + wholes[2]}
    want = torch.stack([models[uid] @ row for uid, row in zip(uids, x.double(), strict=False)])
    want = want if bias is None else want + bias
    torch.testing.assert_close(out[: len(uids)].double(), want, rtol=1e-4, atol=1e-4)
    assert not out[len(uids) :].any()


@pytest.mark.parametrize(
    ("uids", "cut"), [([7] * LONG, True), ([7] * (LARGE_FROM - 1), False), ([0] * LONG, False)]
)
def test_only_large_batches_of_sparse_deltas_are_cut_up(uids: list[int], cut: bool) -> None:
    assert (merged_product.tiles(made(uids)[0], SHAPE, torch.empty(len(uids), INPUTS)) is not None) == cut


def test_rotated_inputs_are_not_merged() -> None:
    context, _ = made([7] * LONG, SPARSE | {"boft"})
    assert context.batch.merged == (Run(0, 0, LONG),)
    assert merged_product.tiles(context, SHAPE, torch.empty(LONG, INPUTS)) is None


def test_a_layer_with_deltas_not_in_squares_is_not_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged_product, "in_squares", sparse_delta.in_squares)
    context, _ = made([7] * LONG)
    assert merged_product.tiles(context, SHAPE, torch.empty(LONG, INPUTS)) is None


def test_only_a_plain_weight_is() -> None:
    layer, rows = torch.nn.Module(), sum(WIDTHS)
    kept = merged_product.PlainWeight(layer, SHAPE)
    assert kept.of(torch.float32) is None
    for weight, plain in (
        (torch.randn(rows, INPUTS), True),
        (torch.randn(rows, INPUTS + 1)[:, :-1], False),
        (torch.randn(INPUTS, rows).T, False),
        (torch.randn(rows, INPUTS).half(), False),
        (torch.randn(rows, INPUTS // 2), False),
        (torch.zeros(rows, INPUTS, dtype=torch.uint8), False),
    ):
        layer.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))
        found = kept.of(torch.float32)
        assert (found is not None) == plain
        assert found is None or found.data_ptr() == weight.data_ptr()
