"""A rank's loader at the end of a real line, under the orders of a scheduler's end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from profiler.errors import AdapterError, CheckpointError
from workers.bus.sockets import Message, SchedulerSocket
from workers.kernels.types import Part
from workers.variants.device import DeviceMemory
from workers.variants.layer_weights import LayerWeights
from workers.variants.loader import READERS, Loader
from workers.variants.shapes import LayerShape, NormShape
from workers.variants.variant_cache import VariantCache

WAIT_S = 60
CPU = torch.device("cpu")
FAULTS: dict[str, Exception] = {
    "torn": CheckpointError("torn"),
    "strange": AdapterError("strange"),
    "crowded": RuntimeError("out of memory"),
}


class Variant:
    """128 bytes of its number."""

    def __init__(self, number: int) -> None:
        self._number = number

    def _fill(self, into: Mapping[str, torch.Tensor]) -> None:
        into["x"].fill_(self._number)

    def layer_weights(self, layer: LayerShape, dtype: torch.dtype) -> Sequence[LayerWeights]:
        parts = (Part("x", torch.uint8, (128,)),)
        return [LayerWeights(layer.name, "norm", parts, self._fill, lambda at: (1, at["x"]))]


class Rank:
    """A loader, whose readers wait at the gate of a variant where there is one."""

    def __init__(self, address: str) -> None:
        self.gates: dict[str, threading.Event] = {}
        self.reports: queue.Queue[Message] = queue.Queue()
        self.scheduler_socket = SchedulerSocket(address, lambda sender, message: self.reports.put(message))
        memory = DeviceMemory({("a", "norm"): 2}, 2, 1 << 10, CPU)
        self.variant_cache = VariantCache(self.open, memory, [NormShape("a", 8)], torch.float32, 1 << 20)
        self.loader = Loader(address, 0, self.variant_cache)
        assert self.next() == {"did": "hello", "rank": 0, "capacity": 1 << 10}

    def open(self, path: Path) -> Variant:
        if (gate := self.gates.get(path.name)) is not None:
            assert gate.wait(WAIT_S)
        if path.name in FAULTS:
            raise FAULTS[path.name]
        if not path.name.isdigit():
            raise ValueError(f"no variant in {path}")
        return Variant(int(path.name))

    def gate(self, name: str) -> threading.Event:
        return self.gates.setdefault(name, threading.Event())

    def tell(self, do: str, uid: int, order: int, slot: int | None = None, path: str = "") -> None:
        about = {"uid": uid, "path": path or str(uid)} if do != "clear" else {}
        self.scheduler_socket.send(b"rank-0", {"do": do, "order": order, "slot": slot, **about})

    def next(self) -> Message:
        return self.reports.get(timeout=WAIT_S)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(f"ipc://{tmp_path}/bus")
    yield made
    for gate in made.gates.values():
        gate.set()
    made.loader._socket.close()
    made.scheduler_socket.close()


def identity(report: Message) -> tuple[Any, ...]:
    return tuple(report.get(key) for key in ("did", "uid", "slot", "order"))


def test_reports_repeat_what_they_answer(rank: Rank) -> None:
    rank.tell("prepare", 1, order=7)
    report = rank.next()
    assert identity(report) == ("prepared", 1, None, 7)
    assert (report["bytes"], report["host"]) == (128, {"1": 128})
    rank.tell("place", 1, order=8, slot=1)
    assert identity(rank.next()) == ("placed", 1, 1, 8)
    assert rank.variant_cache.slot_of == {1: 1}
    rank.tell("place", 2, order=9, slot=0, path="nothing")
    report = rank.next()
    assert identity(report) == ("failed", 2, 0, 9)
    assert report["error"] == "no variant in nothing"


@pytest.mark.parametrize(
    ("path", "fault"), [("torn", "files"), ("strange", "variant"), ("crowded", "engine")]
)
def test_a_failure_is_reported_with_its_kind(rank: Rank, path: str, fault: str) -> None:
    for order, do in enumerate(("prepare", "place")):
        rank.tell(do, 1, order=order, slot=None if do == "prepare" else 0, path=path)
        report = rank.next()
        assert (report["did"], report["error"], report["fault"]) == ("failed", str(FAULTS[path]), fault)
    rank.tell("prepare", 2, order=9)
    assert rank.next()["did"] == "prepared"


def test_an_order_that_was_overtaken_while_its_variant_was_read_is_not_carried_out(rank: Rank) -> None:
    """Otherwise the slot would hold a variant that has left by the scheduler's account."""
    slow = rank.gate("1")
    rank.tell("place", 1, order=1, slot=0)
    rank.tell("place", 2, order=2, slot=0)
    assert identity(rank.next()) == ("placed", 2, 0, 2)
    slow.set()
    rank.tell("place", 3, order=3, slot=1)
    rank.tell("prepare", 1, order=4)  # answered once the reader of the first order is done with it
    assert {identity(rank.next()) for _ in range(2)} == {("placed", 3, 1, 3), ("prepared", 1, None, 4)}
    rank.loader._urgent.shutdown()
    rank.loader._placer.shutdown()
    assert rank.variant_cache.slot_of == {2: 0, 3: 1}
    assert rank.reports.empty()


def test_a_slot_that_was_cleared_meanwhile_stays_empty(rank: Rank) -> None:
    slow = rank.gate("1")
    rank.tell("place", 1, order=1, slot=0)
    rank.tell("clear", 0, order=2, slot=0)
    rank.tell("prepare", 2, order=3)
    assert identity(rank.next()) == ("prepared", 2, None, 3)
    slow.set()
    rank.loader._urgent.shutdown()
    rank.loader._placer.shutdown()
    assert rank.variant_cache.slot_of == {}
    assert rank.reports.empty()


def test_awaited_variants_are_read_before_prefetched_ones(rank: Rank) -> None:
    for uid in range(10, 10 + 2 * READERS):
        rank.gate(str(uid))
        rank.tell("prepare", uid, order=uid)
    rank.tell("place", 1, order=99, slot=0)
    assert identity(rank.next()) == ("placed", 1, 0, 99)


def test_a_copy_that_fails_after_steps_may_use_the_variant_is_a_failure_of_the_same_order(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> None:
        raise RuntimeError("lost on the way")

    with monkeypatch.context() as patch:
        patch.setattr(rank.variant_cache, "settle", lost)
        rank.tell("place", 1, order=5, slot=0)
        assert identity(rank.next()) == ("placed", 1, 0, 5)
        report = rank.next()
        assert identity(report) == ("failed", 1, 0, 5)
        assert (report["error"], report["fault"]) == ("lost on the way", "engine")
    rank.tell("clear", 0, order=6, slot=0)
    rank.tell("place", 1, order=7, slot=1)
    assert identity(rank.next()) == ("placed", 1, 1, 7)
    assert rank.variant_cache.slot_of == {1: 1}


def test_reports_tell_whether_a_variant_may_run_while_it_is_copied(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    for order, streams in enumerate((False, True)):
        monkeypatch.setattr(rank.variant_cache._memory, "streams", lambda variant, says=streams: says)
        rank.tell("prepare", 1, order=2 * order)
        assert rank.next()["streams"] == streams
        rank.tell("place", 1, order=2 * order + 1, slot=order)
        assert rank.next()["streams"] == streams


def test_variants_in_host_memory_are_placed_before_those_being_read(rank: Rank) -> None:
    rank.tell("prepare", 1, order=1)
    assert identity(rank.next()) == ("prepared", 1, None, 1)
    for uid in range(10, 10 + 2 * READERS):
        rank.gate(str(uid))
        rank.tell("place", uid, order=uid, slot=1)
    rank.tell("place", 1, order=99, slot=0)
    assert identity(rank.next()) == ("placed", 1, 0, 99)
