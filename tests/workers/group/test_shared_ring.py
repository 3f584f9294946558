"""Messages through memory that processes share, in any order of the processes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.group import shared_ring
from workers.group.shared_ring import WRAP, Layout, Ring

Work = Callable[[], bool]  # whether it is done


@dataclass
class Stream:
    """Does its work one after the other, when it has its turn: as a GPU does."""

    memory: torch.Tensor
    queued: deque[Work] = field(default_factory=deque)

    def turn(self) -> bool:
        if not self.queued or not self.queued[0]():
            return False
        self.queued.popleft()
        return True


class Copied(torch.Tensor):
    """Copies that are the stream's work."""

    stream: Stream | None = None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.Tensor.copy_ and cls.stream is not None:
            to, source = (each.as_subclass(torch.Tensor) for each in args[:2])
            cls.stream.queued.append(lambda: to.copy_(source) is to)
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


@dataclass
class Queued:
    """Counts as the stream's work."""

    stream: Stream

    def wait(self, at: int, number: int) -> None:
        words = self.stream.memory.numpy()[at : at + 4].view("<u4")
        self.stream.queued.append(lambda: (int(words[0]) - number) % WRAP < WRAP // 2)

    def write(self, at: int, number: int) -> None:
        words = self.stream.memory.numpy()[at : at + 4].view("<u4")

        def count() -> bool:
            words[0] = number
            return True

        self.stream.queued.append(count)


@given(
    receivers=st.integers(1, 3),
    places=st.integers(1, 4),
    first=st.sampled_from([0, WRAP - 3]),
    seed=st.integers(0, 1 << 30),
)
def test_all_receive_all_in_any_order_of_their_work(
    receivers: int, places: int, first: int, seed: int
) -> None:
    layout = Layout(receivers + 1, places, 128)
    memory = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    for process in range(-1, receivers + 1):  # as if N messages had been sent before
        memory.numpy()[shared_ring.LINE * (1 + process) :][:4].view("<u4")[0] = first
    streams = [Stream(memory) for _ in range(receivers + 1)]
    rings = [
        Ring(process, receivers, layout, memory.as_subclass(Copied), Queued(stream))
        for process, stream in enumerate(streams)
    ]
    sent = [[10 * number + 1, 10 * number + 2] for number in range(9)]
    received: list[list[torch.Tensor]] = [[] for _ in rings]
    for ring, stream, tensors in zip(rings, streams, received, strict=True):
        ring._number = first
        Copied.stream = stream
        for values in sent:
            is_sender = tensors is received[-1]
            tensors.append(torch.tensor(values if is_sender else [0, 0], dtype=torch.int64))
            ring.pass_on(tensors[-1].as_subclass(Copied))
        Copied.stream = None
    chosen = random.Random(seed)
    while any(stream.queued for stream in streams):
        turns = [stream.turn() for stream in chosen.sample(streams, len(streams))]
        assert any(turns), "nobody can go on"
    for tensors in received:
        assert [tensor.tolist() for tensor in tensors] == sent


@given(processes=st.integers(2, 9), places=st.integers(1, 20), lines=st.integers(1, 5))
def test_no_message_lies_in_another_s_place(processes: int, places: int, lines: int) -> None:
    layout = Layout(processes, places, lines * shared_ring.LINE)
    counts = [layout.WRITTEN, *map(layout.read, range(processes))]
    spans = [range(at, at + shared_ring.LINE) for at in counts]
    spans += [range(at, at + layout.place_bytes) for at in map(layout.place, range(1, places + 1))]
    taken = [byte for span in spans for byte in span]
    assert sorted(taken) == list(range(layout.size_bytes))
    assert layout.place(places + 1) == layout.place(1)


def test_a_message_without_room_is_refused() -> None:
    layout = Layout(2, 2, 128)
    memory = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    ring = Ring(1, 1, layout, memory, Queued(Stream(memory)))
    with pytest.raises(ValueError, match="expected at most 128 bytes, got 136"):
        ring.pass_on(torch.zeros(17, dtype=torch.int64))


def test_memory_is_shared_until_all_have_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_ring, "FOLDER", tmp_path)
    name = shared_ring.create(4096)
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    one, other = (shared_ring.mapped(name, 4096) for _ in range(2))
    shared_ring.unlink(name)
    assert not list(tmp_path.iterdir())
    assert not one.any()
    one[17] = 5
    assert other[17] == 5
    with pytest.raises(FileNotFoundError):
        shared_ring.mapped(name, 4096)


def test_a_full_disk_is_an_error_before_any_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_ring, "FOLDER", tmp_path)
    with pytest.raises(OSError, match=r"large|space"):
        shared_ring.create(1 << 62)
    assert not list(tmp_path.iterdir())
