"""The division of a batch's rows into tiles, some of which meet merged weights."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.kernels.rows import BASE, Int32s, Run
from workers.kernels.sparse_delta.row_tiles import (
    MERGED_FROM,
    NOBODY,
    NOTHING,
    ROWS,
    RowTiles,
    merged_runs,
    most_tiles,
    tiles,
)

CPU = torch.device("cpu")
OF = (0, 2)
PIECES = st.lists(
    st.tuples(st.sampled_from([BASE, 0, 1, 2]), st.integers(1, 3 * MERGED_FROM)), min_size=1, max_size=12
)


def slots_of(pieces: list[tuple[int, int]]) -> Int32s:
    return np.repeat(*np.array(pieces, np.int32).T).astype(np.int32)


@given(PIECES)
def test_every_row_is_in_one_tile_with_its_own_slot_or_the_bases(pieces: list[tuple[int, int]]) -> None:
    slots = slots_of(pieces)
    runs = merged_runs(slots, OF)
    *own, (last, end, _) = tiles(runs, len(slots)).tolist()
    assert (last, end) == (NOBODY, len(slots))
    of_row = np.concatenate([np.full(count, slot) for slot, _, count in own])
    assert [first for _, first, _ in own] == np.cumsum([0, *(count for *_, count in own)])[:-1].tolist()
    assert len(of_row) == len(slots)
    merged = of_row != BASE
    assert (of_row[merged] == slots[merged]).all()
    assert set(of_row[merged]) <= set(OF)
    assert sum(run.end - run.start for run in runs) == merged.sum()
    assert all(count <= ROWS for *_, count in own)


@given(PIECES)
def test_there_are_never_more_than_a_graph_has_room_for(pieces: list[tuple[int, int]]) -> None:
    slots = slots_of(pieces)
    assert len(tiles(merged_runs(slots, OF), len(slots))) <= most_tiles(len(slots))
    assert most_tiles(len(slots)) <= most_tiles(len(slots) + 1)


@given(PIECES)
def test_the_longest_runs_come_first(pieces: list[tuple[int, int]]) -> None:
    slots = slots_of(pieces)
    runs = merged_runs(slots, OF)
    lengths = [run.end - run.start for run in runs]
    cuts = [0, *(np.flatnonzero(np.diff(slots)) + 1).tolist(), len(slots)]
    left = [
        b - a
        for a, b in itertools.pairwise(cuts)
        if int(slots[a]) in OF and Run(int(slots[a]), a, b) not in runs
    ]
    assert min(lengths, default=MERGED_FROM) >= MERGED_FROM
    assert not lengths or max(left, default=0) <= max(min(lengths), MERGED_FROM - 1)


@pytest.mark.parametrize(
    ("pieces", "merged"),
    [
        ([(BASE, 27), (0, 930)], [(0, 930)]),
        ([(0, MERGED_FROM)], [(0, MERGED_FROM)]),
        ([(0, MERGED_FROM - 1)], []),
        ([(1, 930)], []),
        ([(slot, 256) for slot in (0, 2) * 4], [(slot, 256) for slot in (0, 2) * 4]),
    ],
)
def test_rows_of_one_variant_are_merged_into_tiles(
    pieces: list[tuple[int, int]], merged: list[tuple[int, int]]
) -> None:
    assert [(run.slot, run.end - run.start) for run in merged_runs(slots_of(pieces), OF)] == merged


def test_a_launch_finds_its_batchs_tiles_and_none_of_the_one_before() -> None:
    of_batch = RowTiles(2000, CPU)
    runs = (Run(0, 100, 400), Run(2, 400, 900))
    of_batch.update(runs, 1000)
    own = tiles(runs, 1000)
    for rows in (1000, 1100, 2000):  # a graph's rows
        found = of_batch.of(rows).tolist()
        assert len(found) == most_tiles(rows)
        assert found[: len(own)] == own.tolist()
        assert {slot for slot, *_ in found[len(own) :]} <= {NOTHING}
    of_batch.update((), 3)
    assert of_batch.of(2000)[:2].tolist() == [[BASE, 0, 3], [NOBODY, 3, 0]]
    assert set(of_batch.of(2000)[2:, 0].tolist()) == {NOTHING}
