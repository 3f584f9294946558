"""The reads that steps may do while a variant travels to the device: only of arrived parts, and at once.

The device is a line that carries out copies and writes some time after they were given, by their addresses.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.kernels.lora import layout
from workers.kernels.types import total_bytes
from workers.variants import pages, travelling
from workers.variants.device import DeviceMemory, NoRoom
from workers.variants.host import Entry, HostVariant
from workers.variants.slot_uses import SlotUses
from workers.variants.travelling import ARRIVAL, Arrivals, send

CPU = torch.device("cpu")
INPUTS, OUTPUTS = 16, (8, 24)
POISON = 0xFF


class Line:
    """`left` are the copies that were not carried out. After `fails_after` copies it refuses all others."""

    def __init__(self, fails_after: int | None = None) -> None:
        self.left: deque[Any] = deque()
        self.copied: list[tuple[int, int]] = []
        self._takes = fails_after

    def copy(self, into: int, source: int, size: int) -> None:
        self._take()
        self.copied.append((source, size))
        self.left.append(lambda: ctypes.memmove(into, source, size))

    def write(self, arrivals: Arrivals) -> None:
        self._take()
        for _, at, value in arrivals.tolist():
            word = ctypes.c_int64.from_address(at)
            self.left.append(lambda word=word, value=value: setattr(word, "value", value))

    def _take(self) -> None:
        if self._takes is not None:
            self._takes -= 1
            if self._takes < 0:
                raise RuntimeError("refused")

    def carry_out(self) -> Iterator[None]:
        while self.left:
            self.left.popleft()()
            yield


def names(ranks: list[list[int]]) -> list[str]:
    return [f"linear{n}" for n in range(len(ranks))]


def variant(ranks: list[list[int]], seed: int = 0) -> HostVariant:
    """A LoRA, by the ranks of each linear's slices; a linear of ranks 0 has none."""
    entries, at = [], 0
    for name, own in zip(names(ranks), ranks, strict=True):
        parts = layout.parts(INPUTS, OUTPUTS, own, torch.float32)
        entries.append(Entry((name, "lora"), parts, at, partial(layout.describe, own)))
        at += total_bytes(parts)
    made = torch.randint(0, 255, (at,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return HostVariant(made, tuple(entries))


def memory_for(ranks: list[list[int]], line: Line | None, slots: int = 2, variants: int = 2) -> DeviceMemory:
    widths = {(name, "lora"): layout.width(len(OUTPUTS)) for name in names(ranks)}
    made = DeviceMemory(widths, slots, variants * max(variant(ranks).size_bytes, 128), CPU)
    made._line = line
    made.arena.fill_(POISON)
    return made


RANKS = st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=2).filter(any), min_size=1, max_size=9)


@given(RANKS, st.sampled_from([128, 512, 4096]), st.booleans())
def test_a_row_is_marked_ready_when_its_arrays_are_there(
    ranks: list[list[int]], piece: int, second: bool
) -> None:
    line, whole = Line(), memory_for(ranks, None)
    made = memory_for(ranks, line)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(travelling, "PIECE_BYTES", piece)
        for slot in range(1 + second):
            travels = variant(ranks, seed=slot)
            whole.place(slot, travels)
            made.place(slot, travels)
            for _ in line.carry_out():
                for name in names(ranks):
                    row = made.table((name, "lora"))[slot]
                    there = whole.table((name, "lora"))[slot]
                    if row[layout.TOTAL_RANK] > 0:
                        assert torch.equal(row, there)
                        of = slot, travels, name
                        assert torch.equal(arrays(made, *of), arrays(whole, *of))
                    else:  # the kernels know where it will be, and wait
                        assert row[layout.TOTAL_RANK] == -there[layout.TOTAL_RANK]
            assert all(
                torch.equal(made.table((name, "lora")), whole.table((name, "lora"))) for name in names(ranks)
            )
    assert torch.equal(made.arena, whole.arena)


def arrays(memory: DeviceMemory, slot: int, travels: HostVariant, name: str) -> torch.Tensor:
    """A linear's, which begin with its A."""
    (entry,) = (entry for entry in travels.entries if entry.key[0] == name)
    start = memory.fields(slot, entry.key)[0]
    return memory.arena[start : start + entry.end - entry.start]


@given(st.integers(1, 5000), st.sampled_from([64, 1000, 4096]), st.lists(st.integers(1, 5000), max_size=20))
def test_pieces_follow_one_another_and_cover_all(size: int, piece: int, ends: list[int]) -> None:
    source, line = torch.arange(size).to(torch.uint8), Line()
    into, flags = torch.zeros(size, dtype=torch.uint8), torch.zeros(20, dtype=torch.int64)
    arrivals = np.array(
        sorted((min(end, size), flags.data_ptr() + 8 * n, n + 1) for n, end in enumerate(ends)), ARRIVAL
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(travelling, "PIECE_BYTES", piece)
        send(line, source, into.data_ptr(), arrivals)
    at = source.data_ptr()
    for begin, length in line.copied:
        assert begin == at
        assert 0 < length <= piece
        at += length
    assert at == source.data_ptr() + size
    for _ in line.carry_out():
        copied = int((into == source).cumprod(0).sum())
        assert all(copied >= min(end, size) for n, end in enumerate(ends) if flags[n])
    assert flags[: len(ends)].tolist() == [n + 1 for n in range(len(ends))]


def test_pieces_do_not_cross_what_was_page_locked_at_one_time() -> None:
    assert pages.CHUNK_BYTES % travelling.PIECE_BYTES == 0


def test_an_arrival_that_never_comes_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot have 11"):
        send(Line(), torch.zeros(10, dtype=torch.uint8), 0, np.array([(11, 0, 1)], ARRIVAL))


def test_a_device_error_is_reported_before_any_step_may_use_the_variant() -> None:
    ranks = [[2, 2], [1, 3]]
    memory = memory_for(ranks, Line(fails_after=1))
    with pytest.raises(RuntimeError, match="refused"):
        memory.place(0, variant(ranks))
    memory._line = None
    memory.clear(0)
    memory.place(0, variant(ranks))
    assert memory.table(("linear0", "lora"))[0, layout.TOTAL_RANK] == 4


def kept(memory: DeviceMemory) -> HostVariant | None:
    return memory._sent


def test_the_next_copy_waits_until_the_current_copy_is_there() -> None:
    """Its host memory is kept as long, and so is its place on the device."""
    ranks = [[2, 2]]
    line = Line()
    memory = memory_for(ranks, line, variants=1)
    first = variant(ranks)
    memory.place(0, first)
    assert kept(memory) is first
    with pytest.raises(NoRoom):
        memory.place(1, variant(ranks, seed=1))
    assert kept(memory) is None  # it has waited
    memory.settle()


def test_other_kinds_are_there_when_steps_may_use_them() -> None:
    ranks = [[2, 2]]
    memory = memory_for(ranks, Line())
    travels = variant(ranks)
    assert memory.streams(travels)
    (entry,) = travels.entries
    other = HostVariant(travels.memory, (entry, Entry(("linear0", "boft"), (), 0, lambda at: ())))
    assert not memory.streams(other)
    memory._line = None
    assert not memory.streams(travels)


class Stream:
    """A stand-in for CUDA, as far as waiting goes: `given` counts its copies, `waits` are what it waits
    for."""

    def __init__(self) -> None:
        self.given = 0
        self.waits: list[int] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other.given)

    def wait_event(self, event: Event) -> None:
        self.waits.append(event.after)


class Event:
    def record(self, stream: Stream) -> None:
        self.after = stream.given


def test_a_slot_is_overwritten_after_the_last_step_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, default = Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: steps)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: default)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    uses = SlotUses(torch.device("cuda"))

    def waits(slot: int) -> list[int]:
        copies = Stream()
        uses.wait(copies, slot)  # type: ignore[arg-type]
        return copies.waits

    assert waits(0) == [0]  # nothing is known yet: for all
    for number, slots in enumerate(({0, 1}, {1}, {2}, set[int]()), start=1):
        uses.begin_step(slots)
        steps.given = number
    assert [waits(slot) for slot in range(4)] == [[1], [2], [3], []]
    uses.begin_step({1})
    steps.given = 5
    assert waits(1) == [5]
    assert waits(0) == [1]
