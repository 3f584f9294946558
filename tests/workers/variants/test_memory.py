"""Where variants lie: allocator, tables, what a rank holds, and the rows of a batch, each against a plainer
account of the same."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.kernels.rows import (
    BASE,
    FEW_ROWS,
    LARGE_BLOCK,
    SMALL_BLOCK,
    Rows,
    Run,
    group,
    long_runs,
    max_few_tiles,
    max_many_tiles,
    max_tiles,
)
from workers.kernels.sparse_delta.row_tiles import MERGED_FROM, NOBODY
from workers.kernels.types import Part
from workers.variants import pages
from workers.variants.arena_allocator import ArenaAllocator
from workers.variants.batch import Batch
from workers.variants.device import DeviceMemory, NoRoom
from workers.variants.host import Room, pack
from workers.variants.layer_weights import LayerWeights
from workers.variants.shapes import LayerShape, NormShape
from workers.variants.variant_cache import VariantCache

CPU = torch.device("cpu")
UNIT = 128
POISON = 0xA5


# --- allocator ----------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.booleans()), max_size=60), st.integers(1, 20)
)
def test_extents_are_best_fit_over_a_bitmap(steps: list[tuple[int, int, bool]], capacity: int) -> None:
    allocator, owner_of = ArenaAllocator(capacity), [-1] * capacity
    holding: dict[int, int] = {}
    for owner, size, giving in steps:
        if giving:
            allocator.give_back(owner)
            holding.pop(owner, None)
            owner_of = [-1 if o == owner else o for o in owner_of]
        elif owner in holding:
            with pytest.raises(ValueError, match="already"):
                allocator.take(owner, size)
        else:
            free = [s for s in range(capacity - size + 1) if set(owner_of[s : s + size]) <= {-1}]
            expected = min(free, key=lambda s: (_gap(owner_of, s), s), default=None) if size else 0
            assert allocator.take(owner, size) == expected
            if expected is not None:
                holding[owner] = size
                owner_of[expected : expected + size] = [owner] * size
        assert allocator.taken_bytes == sum(holding.values())
        assert [allocator.size_of(o) for o in range(6)] == [holding.get(o, 0) for o in range(6)]


def _gap(owner_of: Sequence[int], at: int) -> int:
    """The number of free bytes around this variant."""
    before, after = itertools.takewhile(_free, owner_of[:at][::-1]), itertools.takewhile(_free, owner_of[at:])
    return len([*before, *after])


def _free(owner: int) -> bool:
    return owner == -1


# --- packing and placing ----------------------------------------------------------------------------


def filled(value: int, bytes_: int, layer: str, op: str = "norm", source: str = "") -> LayerWeights:
    """A weight of one array that is `value` everywhere; its row has the array's place, and the value."""

    def fill(into: Mapping[str, torch.Tensor]) -> None:
        into["x"].fill_(value)

    def row(offsets: Mapping[str, int]) -> tuple[int, ...]:
        return (offsets["x"], value) if bytes_ else (0, value)

    parts = (Part("x", torch.uint8, (bytes_,)),) if bytes_ else ()
    return LayerWeights(layer, op, parts, fill if bytes_ else lambda into: None, row, source)


class Weights:
    """A variant given by its weights, by layer."""

    def __init__(self, *weights: LayerWeights) -> None:
        self._weights = weights

    def layer_weights(self, layer: LayerShape, dtype: torch.dtype) -> Sequence[LayerWeights]:
        return [weights for weights in self._weights if weights.layer == layer.name]


LAYERS = [NormShape(name, 8) for name in "abc"]
WIDTHS = {(name, "norm"): 2 for name in "abc"}


def memory(slots: int = 3, units: int = 8) -> DeviceMemory:
    made = DeviceMemory(WIDTHS, slots, units * UNIT, CPU)
    made.arena.fill_(POISON)
    return made


def one(value: int, bytes_: int = UNIT) -> Weights:
    return Weights(filled(value, bytes_, "a"))


def packed(contents: Weights):  # type: ignore[no-untyped-def]
    return pack(contents, LAYERS, torch.float32, pinned=False)


def test_weights_lie_one_after_the_other_and_shared_ones_once() -> None:
    held = packed(
        Weights(
            filled(1, 100, "a", source="tied"),
            filled(2, 0, "b"),
            filled(3, 130, "b", "second"),
            filled(9, 100, "c", source="tied"),
        )
    )
    assert held.size_bytes == 3 * UNIT
    assert held.operations == {"norm", "second"}
    assert held.memory[:100].unique().tolist() == [1]  # filled by the first of those that share it
    assert held.memory[UNIT : UNIT + 130].unique().tolist() == [3]  # though nothing begins there, too
    rows = {entry.key: entry.row_at(UNIT * 10) for entry in held.entries}
    assert rows == {
        ("a", "norm"): (UNIT * 10, 1),
        ("b", "norm"): (0, 2),
        ("b", "second"): (UNIT * 11, 3),
        ("c", "norm"): (UNIT * 10, 9),
    }


def few(value: int, bytes_: int, layer: str, source: str = "") -> LayerWeights:
    """Tensors of which a step reads little."""
    return replace(filled(value, bytes_, layer, source=source), few_read=True)


def test_tensors_that_steps_read_little_of_stay_in_host_memory_by_rows() -> None:
    device = memory()
    held = packed(Weights(filled(1, 100, "a"), few(2, 130, "b"), few(3, 70, "c")))
    assert (held.device_bytes, held.size_bytes) == (UNIT, 4 * UNIT)
    device.place(0, packed(one(9)))
    device.place(1, held)
    assert device.taken_bytes == 2 * UNIT
    for name, value, size in (("b", 2, 130), ("c", 3, 70)):
        at, told = device.fields(1, (name, "norm"))
        assert told == value
        assert device.table((name, "norm"))[1].tolist() == [at, value]
        there = ctypes.string_at(device.arena.data_ptr() + at, size)  # as a kernel reads it
        assert there == bytes([value]) * size
        assert copied(device, at, size) == [value] * size
    assert copied(device, device.fields(1, ("a", "norm"))[0], 100) == [1] * 100


def copied(device: DeviceMemory, at: int, size: int) -> list[int]:
    into = torch.zeros(size, dtype=torch.uint8)
    device.copy_to(into, 1, Part("x", torch.uint8, (size,)), at)
    values: list[int] = into.tolist()
    return values


@given(st.integers(0, 2000), st.integers(0, 2000), st.integers(1, 500))
def test_no_copy_crosses_what_was_page_locked_at_a_time(start: int, size: int, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pages, "CHUNK_BYTES", chunk)
        cut = list(pages.spans(start, size))
    assert [byte for begin, end in cut for byte in range(begin, end)] == list(range(start, start + size))
    assert all(begin // chunk == (end - 1) // chunk for begin, end in cut)


def test_a_copy_of_what_stays_is_of_no_two_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "CHUNK_BYTES", 50)
    device, sizes = memory(), list[int]()
    device.place(1, packed(Weights(few(5, 130, "a"), few(7, 90, "b"))))
    at = device.fields(1, ("b", "norm"))[0]
    inner = torch.Tensor.copy_

    def copy(into: torch.Tensor, source: torch.Tensor, **options: Any) -> torch.Tensor:
        sizes.append(len(source))
        return inner(into, source, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    assert copied(device, at, 90) == [7] * 90
    assert sizes == [44, 46]  # it begins at byte 256 of what stays


def test_tensors_that_share_memory_with_whole_reads_are_copied() -> None:
    for tied in ((few, filled), (filled, few)):
        first, second = tied
        held = packed(Weights(first(1, 100, "a", source="tied"), second(1, 100, "c", source="tied")))
        assert held.device_bytes == held.size_bytes == UNIT
        assert {entry.row_at(UNIT) for entry in held.entries} == {(UNIT, 1)}


def test_all_is_copied_for_a_device_that_cannot_read_host_memory() -> None:
    held = pack(Weights(few(1, 100, "a")), LAYERS, torch.float32, pinned=False, room=Room(reads_host=False))
    assert held.device_bytes == held.size_bytes == UNIT


def test_host_tensors_are_kept_as_long_as_their_slot_needs_them() -> None:
    """Though its variant is forgotten; and it counts meanwhile."""
    library = {"1": Weights(filled(1, UNIT, "a"), few(2, 2 * UNIT, "b")), "2": one(3)}
    held = VariantCache(lambda path: library[path.name], memory(), LAYERS, torch.float32, 100 * UNIT)
    assert held.place(1, "1", 0) == UNIT
    staying = weakref.ref(held.prepare(1, "1").staying)
    assert (held.host_bytes, held.in_host(), held.staying()) == (3 * UNIT, {1: 3 * UNIT}, {})
    held.forget(1)
    gc.collect()
    assert staying() is not None
    assert (held.host_bytes, held.in_host(), held.staying()) == (2 * UNIT, {}, {1: 2 * UNIT})
    gone, threads = threading.Event(), list[threading.Thread]()

    def let_go() -> None:
        threads.append(threading.current_thread())
        gone.set()

    weakref.finalize(staying(), let_go)
    held.place(2, "2", 0)
    assert gone.wait(60)
    assert threads[0] is not threading.current_thread()  # no request waits for that
    assert held.host_bytes == UNIT


def test_a_variant_that_is_read_again_while_it_is_in_a_slot_counts_twice() -> None:
    """For its slot keeps what it had."""
    variant = Weights(filled(1, UNIT, "a"), few(2, 2 * UNIT, "b"))
    held = VariantCache(lambda path: variant, memory(), LAYERS, torch.float32, 100 * UNIT)
    held.place(1, "1", 0)
    held.forget(1)
    held.prepare(1, "1")
    assert held.host_bytes == 5 * UNIT


def test_a_warning_comes_when_host_tensors_take_all_host_memory(caplog: pytest.LogCaptureFixture) -> None:
    library = {f"{n}": Weights(few(n, UNIT, "b")) for n in range(1, 5)}
    held = VariantCache(lambda path: library[path.name], memory(), LAYERS, torch.float32, 2 * UNIT)
    for uid in range(1, 4):
        held.place(uid, f"{uid}", uid - 1)
    held.prepare(4, "4")
    held.prepare(1, "1")
    (told,) = [record for record in caplog.records if "--host-gib" in record.getMessage()]
    assert f"take {3 * UNIT} bytes" in told.getMessage()


@pytest.mark.parametrize("leave", ["cleared", "no room"])
def test_host_tensors_are_freed_with_their_slot(leave: str) -> None:
    device = memory()
    held = packed(Weights(few(2, 2 * UNIT, "b")))
    device.place(0, held)
    staying = weakref.ref(held.staying)
    del held
    gc.collect()
    assert staying() is not None
    if leave == "cleared":
        device.clear(0)
    else:
        with pytest.raises(NoRoom):
            device.place(0, packed(one(1, 9 * UNIT)))
    assert [kept.numel() for kept in device.left()] == [2 * UNIT]
    gc.collect()
    assert staying() is None
    assert (device.staying_bytes(), device.left()) == (0, [])


def test_a_variant_is_copied_chunk_by_chunk_to_where_it_was_put(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "CHUNK_BYTES", 100)
    device = memory()
    device.place(0, packed(one(7)))
    held = packed(Weights(filled(1, UNIT, "a"), filled(2, 2 * UNIT, "b"), filled(3, 70, "c")))
    assert held.size_bytes > 300
    device.place(1, held)
    assert torch.equal(device.arena[UNIT : UNIT + held.size_bytes], held.memory)
    assert set(device.arena[:UNIT].tolist()) == {7}
    assert set(device.arena[UNIT + held.size_bytes :].tolist()) == {POISON}


def test_tables_say_where_a_slots_weights_lie_and_nothing_of_other_slots() -> None:
    device = memory()
    first = packed(Weights(filled(1, UNIT, "a"), filled(2, 2 * UNIT, "c")))
    device.place(1, first)
    device.place(2, packed(one(7)))
    assert device.table(("a", "norm")).tolist() == [[0, 0], [0, 1], [3 * UNIT, 7]]
    assert device.table(("b", "norm")).tolist() == [[0, 0]] * 3
    assert device.table(("c", "norm")).tolist() == [[0, 0], [UNIT, 2], [0, 0]]
    assert device.arena.view(8, UNIT)[:, 0].tolist() == [1, 2, 2, 7] + 4 * [POISON]
    assert (device.taken_bytes, device.bytes_of(1), device.bytes_of(0)) == (4 * UNIT, 3 * UNIT, 0)


def test_a_slot_is_used_again_without_a_trace_of_who_was_there() -> None:
    device = memory()
    device.place(0, packed(Weights(filled(1, UNIT, "a"), filled(2, UNIT, "c"))))
    device.place(0, packed(Weights(filled(3, UNIT, "b"))))
    assert [device.table((name, "norm"))[0].tolist() for name in "abc"] == [[0, 0], [0, 3], [0, 0]]
    assert device.taken_bytes == UNIT
    device.clear(0)
    assert [device.table((name, "norm"))[0].tolist() for name in "abc"] == [[0, 0]] * 3
    assert device.taken_bytes == 0


def test_a_failed_placement_leaves_the_slot_empty_and_others_in_place() -> None:
    device = memory(units=4)
    device.place(0, packed(one(1, 2 * UNIT)))
    device.place(1, packed(one(2)))
    with pytest.raises(NoRoom, match=f"{3 * UNIT} bytes"):
        device.place(1, packed(one(3, 3 * UNIT)))
    assert device.table(("a", "norm")).tolist() == [[0, 1], [0, 0], [0, 0]]
    assert device.arena[: 2 * UNIT].unique().tolist() == [1]
    device.clear(0)
    device.place(1, packed(one(3, 3 * UNIT)))
    assert device.table(("a", "norm")).tolist() == [[0, 0], [0, 3], [0, 0]]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=30))
def test_a_placed_variant_stays_until_its_slot_is_taken(steps: list[tuple[int, int]]) -> None:
    device, expected = memory(units=7), {}
    for value, (slot, units) in enumerate(steps, start=1):
        try:
            device.place(slot, packed(one(value % 250, units * UNIT)))
            expected[slot] = (value % 250, units)
        except NoRoom:
            expected.pop(slot, None)
        for kept, (held, size) in expected.items():
            start, told = device.table(("a", "norm"))[kept].tolist()
            assert told == held
            assert device.arena[start : start + size * UNIT].unique().tolist() == ([held] if size else [])


# --- what a rank holds --------------------------------------------------------------------------------


class Library:
    """Opens variants by path, "value:units", and counts how often; a gate may hold readers up."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, path: Path) -> Weights:
        self.opened.append(path.name)
        assert self.gate.wait(60)
        value, units = path.name.split(":")
        if value == "bad":
            raise ValueError("not sound")
        return one(int(value), int(units) * UNIT)


def variant_cache(library: Library, units: int = 8, host_units: int = 100, slots: int = 3) -> VariantCache:
    return VariantCache(library, memory(slots, units), LAYERS, torch.float32, host_units * UNIT)


def test_simultaneous_prefetches_of_a_variant_read_it_once() -> None:
    library = Library()
    held = variant_cache(library)
    library.gate.clear()
    with ThreadPoolExecutor(8) as pool:
        made = [pool.submit(held.prepare, 1, "5:2") for _ in range(8)]
        library.gate.set()
    assert library.opened == ["5:2"]
    assert len({id(each.result()) for each in made}) == 1
    assert not held._reading


def test_host_memory_forgets_who_was_used_longest_ago() -> None:
    library = Library()
    held = variant_cache(library, host_units=5)
    for uid, path in ((1, "1:2"), (2, "2:2"), (1, "1:2"), (3, "3:2")):
        held.prepare(uid, path)
    assert held.in_host() == {1: 2 * UNIT, 3: 2 * UNIT}
    held.prepare(4, "4:8")  # more than all host memory: it stays, alone
    assert held.in_host() == {4: 8 * UNIT}
    assert held.host_bytes == 8 * UNIT
    held.forget(4)
    assert held.in_host() == {}


@pytest.mark.parametrize("forget", [True, False])
def test_a_deleted_variant_is_released_where_no_request_waits(forget: bool) -> None:
    """The copy runs neither under the cache's lock nor in the thread that loads."""
    held, gone = variant_cache(Library(), host_units=5), threading.Event()
    threads: list[threading.Thread] = []

    def let_go() -> None:
        threads.append(threading.current_thread())
        with held._lock:
            gone.set()

    weakref.finalize(held.prepare(1, "1:2").memory, let_go)
    if forget:
        held.forget(1)
    else:
        held.prepare(2, "2:5")
    assert gone.wait(60)
    assert threads[0] is not threading.current_thread()


def test_a_variant_that_cannot_be_read_is_tried_again() -> None:
    library = Library()
    held = variant_cache(library)
    for _ in range(2):
        with pytest.raises(ValueError, match="not sound"):
            held.prepare(1, "bad:1")
    with pytest.raises(ValueError, match=f"needs {9 * UNIT} bytes"):
        held.prepare(2, "2:9")
    assert library.opened == ["bad:1", "bad:1", "2:9"]
    assert not held._reading
    assert held.in_host() == {}


def in_slots(held: VariantCache) -> dict[int, int]:
    """Bytes by slot."""
    with held._placing:
        return {slot: held._memory.bytes_of(slot) for slot in held._uid_in}


def test_a_variant_is_in_one_slot_and_a_slot_has_one_variant() -> None:
    held = variant_cache(Library())
    held.place(1, "1:2", 0)
    held.place(2, "2:2", 1)
    held.place(1, "1:2", 2)  # it moves
    assert held.slot_of == {1: 2, 2: 1}
    assert in_slots(held) == {1: 2 * UNIT, 2: 2 * UNIT}
    held.place(3, "3:2", 0)  # where it was before
    assert held.slot_of == {1: 2, 2: 1, 3: 0}
    held.clear(1)
    assert held.slot_of == {1: 2, 3: 0}
    assert set(held.operations_of) == {1, 3}


def test_placing_and_clearing_in_many_threads_stays_consistent() -> None:
    held = variant_cache(Library(), units=6)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(60):
            uid, slot = int(rng.integers(1, 6)), int(rng.integers(0, 3))
            if rng.random() < 0.3:
                held.clear(slot)
            else:
                with contextlib.suppress(NoRoom):
                    assert held.place(uid, f"{uid}:{1 + uid % 3}", slot) == (1 + uid % 3) * UNIT
            assert sum(in_slots(held).values()) <= 6 * UNIT

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    table = held._memory.table(("a", "norm")).tolist()
    values = {slot: row[1] for slot, row in enumerate(table) if row[1]}
    assert values == {slot: uid for uid, slot in held.slot_of.items()}
    assert in_slots(held) == {slot: (1 + uid % 3) * UNIT for uid, slot in held.slot_of.items()}


# --- the rows of a batch --------------------------------------------------------------------------------

SLOTS = 4
ROWS = st.lists(st.integers(BASE, SLOTS - 1), max_size=150)


@given(ROWS, st.sampled_from([SMALL_BLOCK, LARGE_BLOCK]))
def test_tiles_cover_each_variants_rows_once(slots: list[int], block: int) -> None:
    grouping = group(np.array(slots, np.int32))
    tiles = grouping.small if block == SMALL_BLOCK else grouping.large
    covered: dict[int, list[int]] = {}
    for slot, first, count in tiles.tolist():
        assert 0 < count <= block
        covered.setdefault(slot, []).extend(grouping.order[first : first + count].tolist())
    used = set(slots) - {BASE}
    assert covered == {s: [row for row, own in enumerate(slots) if own == s] for s in used}
    assert len(tiles) <= max_tiles(len(slots), SLOTS, block)


@given(ROWS)
def test_variants_of_few_rows_and_of_many_are_cut_apart(slots: list[int]) -> None:
    grouping = group(np.array(slots, np.int32))
    rows = {slot: [row for row, own in enumerate(slots) if own == slot] for slot in set(slots) - {BASE}}
    for tiles, block, counts in (
        (grouping.few, SMALL_BLOCK, range(1, FEW_ROWS + 1)),
        (grouping.many, LARGE_BLOCK, range(FEW_ROWS + 1, len(slots) + 1)),
    ):
        covered: dict[int, list[int]] = {}
        for slot, first, count in tiles.tolist():
            assert 0 < count <= block
            covered.setdefault(slot, []).extend(grouping.order[first : first + count].tolist())
        assert covered == {slot: own for slot, own in rows.items() if len(own) in counts}
    assert len(grouping.few) <= max_few_tiles(len(slots), SLOTS)
    assert len(grouping.many) <= max_many_tiles(len(slots), SLOTS)


@given(st.lists(ROWS, min_size=1, max_size=6))
def test_a_new_batch_leaves_nothing_of_the_last(batches: list[list[int]]) -> None:
    rows = Rows(150, SLOTS, CPU)
    address = rows.slots(150).data_ptr()
    for slots in batches:
        rows.update(np.array(slots, np.int32))
        assert rows.slots(150).tolist() == slots + [BASE] * (150 - len(slots))
        assert rows.slots(150).data_ptr() == address
        found = {slot: members.tolist() for slot, members in rows.groups()}
        assert found == {s: [r for r, own in enumerate(slots) if own == s] for s in set(slots) - {BASE}}
        tiles = rows.tiles(len(slots))
        assert tiles.tiles[:, 2][tiles.tiles[:, 0] != BASE].sum() == sum(s != BASE for s in slots)


@given(st.lists(st.sampled_from([0, 11, 22, 33]), max_size=40))
def test_a_batch_turns_uids_into_slots(uids: list[int]) -> None:
    batch, slot_of = Batch(40, 40, SLOTS, CPU), {11: 2, 22: 0, 33: 3}
    batch.describe(uids, uids[::-1], slot_of, frozenset({"lora"}))
    expected = [slot_of.get(uid, BASE) for uid in uids]
    assert batch.tokens.slots(len(uids)).tolist() == expected
    assert batch.samples.slots(len(uids)).tolist() == expected[::-1]
    assert batch.operations == {"lora"}


@given(
    st.lists(st.tuples(st.sampled_from([BASE, 0, 1, 2]), st.integers(1, 5)), max_size=12), st.integers(1, 6)
)
def test_long_runs_are_all_that_cannot_be_longer(pieces: list[tuple[int, int]], at_least: int) -> None:
    slots, of = [slot for slot, count in pieces for _ in range(count)], {0, 2}
    found = long_runs(np.array(slots, np.int32), of, at_least)
    expected = [
        Run(slots[start], start, end)
        for start in range(len(slots))
        for end in range(start + at_least, len(slots) + 1)
        if set(slots[start:end]) <= {slots[start]} & of
        if start == 0 or slots[start - 1] != slots[start]
        if end == len(slots) or slots[end] != slots[start]
    ]
    assert list(found) == expected


def test_a_batch_of_variants_that_this_rank_has_nothing_of_is_described_all_the_same() -> None:
    """It runs from a graph of all operations, which would add those of the batch before."""
    batch = Batch(3 * MERGED_FROM, 4, SLOTS, CPU, merges=True)
    batch.describe([22] * 2 * MERGED_FROM, (1,), {22: 0, 1: 1}, frozenset({"sparse_delta"}), sparse=[0])
    batch.describe([11] * MERGED_FROM, (11,), {11: 2}, frozenset(), sparse=[0])
    assert batch.tokens.slots(MERGED_FROM).tolist() == [2] * MERGED_FROM
    assert batch.others.slots(MERGED_FROM).tolist() == [2] * MERGED_FROM
    assert batch.samples.slots(1).tolist() == [2]
    assert batch.row_tiles is not None
    assert batch.row_tiles.of(3 * MERGED_FROM)[:2].tolist() == [
        [BASE, 0, MERGED_FROM],
        [NOBODY, MERGED_FROM, 0],
    ]


def test_long_runs_of_sparse_deltas_are_merged() -> None:
    batch = Batch(3 * MERGED_FROM, 4, SLOTS, CPU, merges=True)
    slot_of, enough = {11: 2, 22: 0, 33: 3}, MERGED_FROM
    uids = [22, 11, *[22] * enough, 0, *[11] * enough]
    batch.describe(uids, (), slot_of, frozenset({"sparse_delta"}), sparse=[0])
    assert list(batch.merged) == [Run(0, 2, 2 + enough)]
    assert batch.tokens.slots(len(uids)).tolist() == [slot_of.get(uid, BASE) for uid in uids]
    assert batch.others.slots(len(uids)).tolist() == [0, 2, *[BASE] * (enough + 1), *[2] * enough]
    batch.describe(uids[:enough], (), slot_of, frozenset({"sparse_delta"}), sparse=[0])
    assert not batch.merged
    assert batch.others.slots(enough).tolist() == [slot_of.get(uid, BASE) for uid in uids[:enough]]
    assert batch.others.grouping is batch.tokens.grouping  # rows are grouped once
    never = Batch(3 * MERGED_FROM, 4, SLOTS, CPU)
    never.describe(uids, (), slot_of, frozenset({"sparse_delta"}), sparse=[0])
    assert not never.merged
    assert never.tiles_of(3 * MERGED_FROM) is None


def test_more_rows_than_there_is_room_for_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 4 rows, got 5"):
        Rows(4, SLOTS, CPU).update(np.zeros(5, np.int32))
