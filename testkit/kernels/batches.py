"""Batches and adapters that the kernels' tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from workers.kernels.rows import BASE, LARGE_BLOCK, Rows, Tiles, max_tiles

CPU = torch.device("cpu")
Run = Callable[[Any, torch.Tensor, torch.Tensor, Rows], None]  # of a model, x, out and the rows
POISON = -(2**30)  # a slot or a row that would fault if a kernel used it


def rows_of(slots: list[int], num_slots: int, padded: int | None = None) -> Rows:
    """The rows of a batch of `slots`, with room for `padded` rows, of which the rest are in no tile."""
    rows = Rows(padded or max(1, len(slots)), num_slots, CPU)
    rows.update(np.array(slots, np.int32))
    return rows


def poisoned(rows: Rows) -> Rows:
    """The same with every unused entry of `order` set to nonsense."""
    rows.tiles(1).order[len(rows.grouping.order) :] = POISON
    return rows


def with_large_tiles(rows: Rows) -> Rows:
    """The same, cut as for a prefill, even with few rows."""
    large = rows._parts["large"].view(-1, 3)

    def tiles(num_rows: int) -> Tiles:
        most = max_tiles(num_rows, rows.num_slots, LARGE_BLOCK)
        return Tiles(num_rows, LARGE_BLOCK, most, large[:most], rows._parts["order"])

    rows.tiles = tiles  # type: ignore[method-assign]
    return rows


def check_dense(run: Run, model: Any, inputs: int, rows: Rows, slots: list[int], atol: float) -> None:
    """`run` adds what `model` says to each row, in float32; the base's rows and padding stay as they are."""
    padded = slots + [BASE] * (rows.max_rows - len(slots))
    x, y = torch.randn(len(padded), inputs), torch.randn(len(padded), sum(model.slices))
    out = y.clone()
    run(model, x, out, rows)
    torch.testing.assert_close(out.double(), model.dense(x, y, padded), rtol=0, atol=atol)
    untouched = [row for row, slot in enumerate(padded) if slot == BASE or model.is_empty(slot)]
    assert torch.equal(out[untouched], y[untouched])


def check_alone_as_among(run: Run, model: Any, inputs: int, count: int) -> None:
    """Check that a row's result does not depend on the other rows of its batch."""
    x = torch.randn(count, inputs)
    alone, among = torch.zeros(1, *model.slices), torch.zeros(count, *model.slices)
    run(model, x[:1], alone, rows_of([0], 2))
    run(model, x, among, rows_of([0, *some_slots(3, count - 1, 2)], 2))
    assert torch.equal(alone[0], among[0])


def some_slots(seed: int, count: int, num_slots: int) -> list[int]:
    """Random slots, the base among them."""
    found: list[int] = np.random.default_rng(seed).integers(BASE, num_slots, count).tolist()
    return found
