"""Which kernel multiplies which rows, with a recorder in the place of its launch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from workers.kernels import rows
from workers.kernels.rows import FEW_ROWS, Rows, Tiles
from workers.kernels.sparse_delta import tensor_cores
from workers.kernels.sparse_delta.tensor_cores import Config, Few, Many

CPU = torch.device("cpu")
SLICES = (4096,) * 3
INPUTS = 4096
Launched = list[tuple[Config, set[int]]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    """Each launch: its kernel, and the slots whose rows it has."""
    found: Launched = []

    def launch(*given: Any) -> None:
        tiles: Tiles = given[4]
        config: Config = given[6]
        found.append((config, set(tiles.tiles[:, 0].tolist()) - {-1}))

    monkeypatch.setattr(tensor_cores, "_launch", launch)
    rows.batch_invariant.cache_clear()
    yield found
    rows.batch_invariant.cache_clear()


def multiply(*rows_of: int) -> None:
    """N rows of each slot."""
    slots = np.repeat(np.arange(len(rows_of), dtype=np.int32), rows_of)
    described = Rows(len(slots), len(rows_of), CPU)
    described.update(slots)
    x, out = (
        torch.empty(len(slots), INPUTS, device="meta"),
        torch.empty(len(slots), sum(SLICES), device="meta"),
    )
    tensor_cores.apply(x, out, torch.empty(0), torch.empty(0), described, SLICES)


def test_decoding_rows_in_a_batch_with_a_prompt_keep_the_decoding_kernel(launched: Launched) -> None:
    multiply(1, FEW_ROWS, FEW_ROWS + 1)
    (many, prompts), (few, decoding) = launched
    assert isinstance(many, Many)
    assert isinstance(few, Few)
    assert (prompts, decoding) == ({2}, {0, 1})


def test_a_small_step_is_one_launch(launched: Launched) -> None:
    multiply(1, tensor_cores.MANY_FROM - 2)
    ((config, slots),) = launched
    assert isinstance(config, Few)
    assert slots == {0, 1}


@pytest.mark.parametrize("many", [1, 64, 1000])
def test_a_row_is_summed_in_one_order_where_batches_may_not_matter(
    monkeypatch: pytest.MonkeyPatch, launched: Launched, many: int
) -> None:
    monkeypatch.setenv(rows.INVARIANT, "1")
    multiply(many, 1)
    ((config, slots),) = launched
    assert isinstance(config, Few)
    assert slots == {0, 1}


# The parts timed on an H200 (benchmarks/results/sparse_delta_many_rows.json) that ended first.
@pytest.mark.parametrize(
    ("batch", "inputs", "slices", "parts"),
    [
        (64, 4096, (4096,) * 3, 4),
        (256, 4096, (4096,) * 3, 1),
        (930, 4096, (4096,) * 3, 1),
        (192, 4096, (4096,), 4),
        (512, 4096, (4096,), 2),
        (930, 4096, (4096,), 1),
        (64, 4096, (11008,) * 2, 2),
        (192, 4096, (11008,) * 2, 1),
        (192, 11008, (4096,), 4),
        (512, 11008, (4096,), 2),
        (930, 11008, (4096,), 1),
    ],
)
def test_inputs_are_shared_out_as_ended_soonest(
    batch: int, inputs: int, slices: tuple[int, ...], parts: int
) -> None:
    chosen = tensor_cores.config_for(batch, inputs, slices, rows.LARGE_BLOCK)
    assert chosen == Many(parts, tensor_cores.MANY_ROWS[parts].stages)


@pytest.mark.parametrize("invariant", [True, False])
def test_small_tiles_with_a_prefill_have_few_rows_unless_all_tiles_are_small(
    monkeypatch: pytest.MonkeyPatch, invariant: bool
) -> None:
    monkeypatch.setattr(tensor_cores, "batch_invariant", lambda: invariant)
    some = [tensor_cores.config_for(n, 4096, (4096,), rows.SMALL_BLOCK) for n in (33, 511, 512)]
    assert some[:2] == [tensor_cores.SOME_ROWS] * 2
    assert (some[2] == tensor_cores.SOME_ROWS) == invariant
