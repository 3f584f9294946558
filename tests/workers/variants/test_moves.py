"""Variants that move in the arena: which, by how few bytes, and what steps read meanwhile."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from profiler.roofline import MOVED_AT_ONCE_BYTES
from workers.kernels.types import ALIGNMENT, Part
from workers.variant_config import VariantConfig
from workers.variants import operators
from workers.variants.arena_allocator import ArenaAllocator, Move
from workers.variants.batch import Batch
from workers.variants.device import DeviceMemory, NoRoom, _moved_spans
from workers.variants.host import HostVariant, pack
from workers.variants.layer_context import LayerContext, Workspace
from workers.variants.layer_weights import LayerWeights
from workers.variants.shapes import LayerShape, NormShape

CPU = torch.device("cpu")
UNIT = ALIGNMENT


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.booleans()), max_size=40), st.integers(1, 24)
)
def test_a_block_that_fits_has_room_after_moves(steps: list[tuple[int, int, bool]], capacity: int) -> None:
    """If all gaps together are as large, and otherwise nothing moves; nothing lies over anything, ever."""
    allocator, lies, sizes = ArenaAllocator(capacity), [-1] * capacity, dict[int, int]()
    for owner, size, giving in steps:
        if giving or owner in sizes:
            allocator.give_back(owner)
            sizes.pop(owner, None)
            lies = [-1 if o == owner else o for o in lies]
            continue
        start = allocator.take(owner, size)
        if start is None:
            moves = allocator.moves_for(size)
            assert (moves is None) == (sum(sizes.values()) + size > capacity)
            if moves is None:
                continue
            assert sum(m.size for m in moves) <= fewest_moved(lies, size)
            for move in moves:
                assert 0 <= move.target < move.source
                lies[move.source : move.source + move.size] = [-1] * move.size
                assert set(lies[move.target : move.target + move.size]) == {-1}
                lies[move.target : move.target + move.size] = [move.owner] * move.size
                allocator.moved(move)
            start = allocator.take(owner, size)
        assert start is not None
        assert set(lies[start : start + size]) == {-1}
        lies[start : start + size] = [owner] * size
        sizes[owner] = size
        assert {o: lies.count(o) for o in sizes} == sizes


def fewest_moved(lies: list[int], size: int) -> int:
    """The bytes of other variants in the part of the arena with the fewest of them that has `size` free bytes
    and cuts no variant in two."""
    ends = [at for at in range(len(lies) + 1) if at in (0, len(lies)) or lies[at - 1] != lies[at]]
    ends += [at for at in range(1, len(lies)) if lies[at - 1] == lies[at] == -1]
    stretches = (lies[a:b] for a, b in itertools.combinations(sorted(set(ends)), 2))
    return min(len(s) - s.count(-1) for s in stretches if s.count(-1) >= size)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 60), st.integers(0, 20))
def test_a_move_is_made_of_copies_that_do_not_overlap(way: int, size: int, target: int, between: int) -> None:
    """A GPU's copy may make anything of overlapping bytes."""
    move = Move(0, target + way, target, size)
    memory = list(range(target + way + size))
    for begin, end in _moved_spans(move, between):
        if end - begin > way:
            assert end - begin <= between  # through what lies between
        memory[begin - way : end - way] = memory[begin:end]
    assert memory[target : target + size] == list(range(target + way, target + way + size))


def norm_of(value: int, units: int, name: str = "a") -> HostVariant:
    """A norm of 32 weights that are all `value`, with other bytes before it."""
    part, filler = Part("w", torch.float32, (32,)), Part("x", torch.uint8, ((units - 1) * UNIT,))

    def fill(into: Mapping[str, torch.Tensor]) -> None:
        into["w"].fill_(value)
        if units > 1:
            into["x"].fill_(value)

    def row(at: Mapping[str, int]) -> tuple[int, ...]:
        return 1, at["w"], 0

    parts = (filler, part) if units > 1 else (part,)
    weights = LayerWeights(name, "norm", parts, fill, row)

    class Contents:
        def layer_weights(self, layer: LayerShape, dtype: torch.dtype) -> list[LayerWeights]:
            return [weights]

    return pack(Contents(), [NormShape(name, 32)], torch.float32, pinned=False)


def norms(slots: int, units: int) -> DeviceMemory:
    width = operators.table_width("norm", NormShape("a", 32))
    return DeviceMemory({("a", "norm"): width}, slots, units * UNIT, CPU)


def value_of(memory: DeviceMemory, slot: int) -> float:
    """The values that a kernel reads by the slot's row on the device; the host's copy has the same."""
    row = memory.table(("a", "norm"))[slot].tolist()
    assert row == memory.fields(slot, ("a", "norm"))
    weights = memory.arena[row[1] : row[1] + 4 * 32].view(torch.float32)
    assert weights.unique().numel() == 1
    return float(weights[0])


@pytest.mark.parametrize("seed", range(5))
def test_rows_follow_variants_that_move_and_room_is_for_what_fits(seed: int) -> None:
    rng = random.Random(seed)
    memory, held = norms(6, 32), dict[int, tuple[int, int]]()
    capacity = memory.capacity_bytes // UNIT
    assert capacity >= 30
    for value in range(1, 80):
        slot, units = rng.randrange(6), rng.randint(1, 14)
        others = sum(u for s, (_, u) in held.items() if s != slot)
        if others + units > capacity:
            with pytest.raises(NoRoom) as refused:
                memory.place(slot, norm_of(value, units))
            assert refused.value.size_bytes == units * UNIT
            held.pop(slot, None)
        else:
            memory.place(slot, norm_of(value, units))
            held[slot] = value, units
        assert {s: value_of(memory, s) for s in held} == {s: v for s, (v, _) in held.items()}
        assert memory.taken_bytes == sum(u for _, u in held.values()) * UNIT


@pytest.mark.parametrize("way", [3, 30_000])
def test_a_variant_moves_while_steps_read_it(way: int) -> None:
    """Each operation sees all of a move or nothing; of 5 MB that move a few bytes, or more than they are."""
    large, most = 40_000, 40_000 + way + 10
    moving, first, last = norm_of(5, large), norm_of(9, way), norm_of(3, way + 8)
    for _ in range(10):
        memory = norms(3, most)
        memory.place(0, first)
        memory.place(1, moving)
        wrong, done, begun = list[float](), threading.Event(), threading.Event()
        reader = threading.Thread(target=read_steps, args=(memory, 1, 5.0, wrong, begun, done))
        reader.start()
        try:
            assert begun.wait(60)
            before = memory.fields(1, ("a", "norm"))[1]
            memory.clear(0)
            memory.place(2, last)
            assert memory.fields(1, ("a", "norm"))[1] == before - way * UNIT
        finally:
            done.set()
            reader.join()
        assert not wrong
        assert value_of(memory, 2) == 3.0


def read_steps(
    memory: DeviceMemory,
    slot: int,
    expected: float,
    wrong: list[float],
    begun: threading.Event,
    done: threading.Event,
) -> None:
    batch = Batch(8, 8, 3, CPU)
    config = VariantConfig(3, 1 << 20, 1 << 20, 1, kinds=("sparse_delta",))
    table = {"norm": memory.table(("a", "norm"))}
    context = LayerContext(batch, memory.arena, table, Workspace(config, 8, 1, CPU), memory.layout)
    batch.describe((7,) * 8, (7,) * 8, {7: slot}, frozenset({"norm"}))
    source = torch.ones(8, 32)
    while not done.is_set():
        out = torch.ones(8, 32)
        operators.norm(out, source, 0.0, context, NormShape("a", 32))
        wrong.extend(value for value in out.unique().tolist() if value != expected)
        begun.set()


def test_moves_go_through_a_buffer_outside_the_arena() -> None:
    """So a block that was planned before variants moved keeps its variant."""
    memory = DeviceMemory({("a", "norm"): 3}, 1, 20 * MOVED_AT_ONCE_BYTES, CPU)
    assert memory.capacity_bytes == memory.arena.numel() == 20 * MOVED_AT_ONCE_BYTES
    assert memory._between.numel() == MOVED_AT_ONCE_BYTES
