"""A pipeline's tokens over torch's own calls, between processes that share memory and such that do not."""

from __future__ import annotations

import enum
import multiprocessing
import sys
import time
from multiprocessing.queues import Queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from workers.group import shared_ring, token_broadcast
from workers.group.shared_ring import WRAP

PROCESSES = 3
GIVE_UP_S = 300


class Polled:
    """Counts that a CPU waits for at once."""

    closed = 0

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory.numpy()

    def wait(self, at: int, number: int) -> None:
        words, ends_s = self._memory[at : at + 4].view("<u4"), time.monotonic() + GIVE_UP_S
        while (int(words[0]) - number) % WRAP >= WRAP // 2:
            assert time.monotonic() < ends_s, "nobody wrote"
            time.sleep(1e-5)

    def write(self, at: int, number: int) -> None:
        self._memory[at : at + 4].view("<u4")[0] = number

    def close(self) -> None:
        Polled.closed += 1


def group_of(rank: int, beside: Any, counts: Any = Polled) -> token_broadcast.SharedMemoryGroup | None:
    return token_broadcast.shared_group([list(range(PROCESSES))], beside, 64, counts)


def tokens(rank: int, beside: Any) -> list[Any]:
    """More of them than there are places."""
    group, received = group_of(rank, beside), []
    for number in range(3 * token_broadcast.PLACES):
        sent = rank == PROCESSES - 1
        tensor = torch.full((8,), number if sent else -1, dtype=torch.int64)
        dist.broadcast(tensor, src=PROCESSES - 1, group=group)
        counts = torch.tensor([number, 1], dtype=torch.int32) if sent else torch.zeros(2, dtype=torch.int32)
        dist.broadcast(counts, src=PROCESSES - 1, group=group)
        received.append((tensor.tolist(), counts.tolist()))
    return received


def from_another(rank: int, beside: Any) -> str:
    group = group_of(rank, beside)
    try:
        dist.broadcast(torch.zeros(1), src=0, group=group)
    except ValueError as error:
        return str(error)
    return "taken"


def elsewhere(rank: int, beside: Any) -> bool:
    """One of them is on another machine."""
    if rank == 1:
        shared_ring.FOLDER = shared_ring.FOLDER / "other"
    return group_of(rank, beside) is None


def no_memory(rank: int, beside: Any) -> bool:
    if rank == 0:
        shared_ring.FOLDER = shared_ring.FOLDER / "none"
    return group_of(rank, beside) is None


def no_locking(rank: int, beside: Any) -> tuple[bool, int]:
    """The driver of one of them refuses; the others unlock what they have."""

    def counts(memory: torch.Tensor) -> Polled:
        if rank == 2:
            raise RuntimeError("it does not lock memory")
        return Polled(memory)

    before = Polled.closed
    return group_of(rank, beside, counts) is None, Polled.closed - before


class Deaf(Polled):
    def wait(self, at: int, number: int) -> None:
        raise RuntimeError("CUDA_ERROR_NOT_SUPPORTED")


def no_waiting(rank: int, beside: Any) -> tuple[bool, int]:
    before = Polled.closed
    return group_of(rank, beside, Deaf if rank == 1 else Polled) is None, Polled.closed - before


CASES = (tokens, from_another, elsewhere, no_memory, no_locking, no_waiting)


def _process(rank: int, folder: Path, found: Queue[Any]) -> None:
    where = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=PROCESSES)
    beside = dist.new_group(list(range(PROCESSES)), backend="gloo")
    for case in CASES:
        shared_ring.FOLDER = folder
        try:
            found.put((case.__name__, rank, case(rank, beside)))
        except BaseException as error:
            found.put((case.__name__, rank, repr(error)))
            raise
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The findings of each process, by case. The processes take seconds to begin, and so do all cases."""
    folder = tmp_path_factory.mktemp("shared")
    context = multiprocessing.get_context("spawn")
    found: Queue[Any] = context.Queue()
    processes = [
        context.Process(target=_process, args=(rank, folder, found), daemon=True) for rank in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    by_case: dict[str, dict[int, Any]] = {case.__name__: {} for case in CASES}
    try:
        while sum(map(len, by_case.values())) < PROCESSES * len(CASES):
            case, rank, answer = found.get(timeout=GIVE_UP_S)
            by_case[case][rank] = answer
            assert not isinstance(answer, str) or case == "from_another", (case, answer)
    except BaseException:
        for process in processes:
            process.kill()
        raise
    for process in processes:
        process.join(GIVE_UP_S)
    assert [process.exitcode for process in processes] == [0] * PROCESSES
    assert not list(folder.glob("ostinato-*")), "the memory has no name any more"
    return {case: [answers[rank] for rank in range(PROCESSES)] for case, answers in by_case.items()}


def test_earlier_stages_receive_the_tokens(outcomes: dict[str, list[Any]]) -> None:
    expected = [([number] * 8, [number, 1]) for number in range(3 * token_broadcast.PLACES)]
    assert outcomes["tokens"] == [expected] * PROCESSES


def test_only_the_last_stage_sends_tokens(outcomes: dict[str, list[Any]]) -> None:
    assert outcomes["from_another"] == ["expected a broadcast of process 2, got 0"] * PROCESSES


@pytest.mark.parametrize("case", ["elsewhere", "no_memory"])
def test_all_keep_vllms_broadcast_where_one_cannot_share(case: str, outcomes: dict[str, list[Any]]) -> None:
    assert outcomes[case] == [True] * PROCESSES


def test_all_unlock_memory_that_one_cannot_use(outcomes: dict[str, list[Any]]) -> None:
    assert outcomes["no_locking"] == [(True, 1), (True, 1), (True, 0)]
    assert outcomes["no_waiting"] == [(True, 1)] * PROCESSES


class Driver:
    """The calls of the driver's API, with their arguments."""

    CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_GEQ=0)
    CUstreamWriteValue_flags = SimpleNamespace(CU_STREAM_WRITE_VALUE_DEFAULT=0)

    def __init__(self, answers: dict[str, tuple[Any, ...]]) -> None:
        self.answers = answers
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            return self.answers.get(name, (Status.SUCCESS,))

        return call


class Status(enum.IntEnum):
    SUCCESS = 0
    NOT_SUPPORTED = 801


def counts_of(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, Any]:
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=SimpleNamespace(driver=driver)))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    memory = torch.zeros(512, dtype=torch.uint8)
    return memory, lambda: token_broadcast.StreamCounts(memory)


def test_a_gpu_waits_and_writes_in_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver({"cuMemHostGetDevicePointer": (Status.SUCCESS, 5000)})
    memory, make = counts_of(driver, monkeypatch)
    counts = make()
    counts.wait(128, 9)
    counts.write(256, 10)
    counts.close()
    assert driver.calls == [
        ("cuMemHostRegister", memory.data_ptr(), 512, 3),  # portable and mapped
        ("cuMemHostGetDevicePointer", memory.data_ptr(), 0),
        ("cuStreamWaitValue32", 77, 5128, 9, 0),
        ("cuStreamWriteValue32", 77, 5256, 10, 0),
        ("cuStreamSynchronize", 77),
        ("cuMemHostUnregister", memory.data_ptr()),
    ]


def test_memory_that_is_not_mapped_is_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver({"cuMemHostGetDevicePointer": (Status.NOT_SUPPORTED, 0)})
    _, make = counts_of(driver, monkeypatch)
    with pytest.raises(RuntimeError, match="NOT_SUPPORTED"):
        make()
    assert driver.calls[-1][0] == "cuMemHostUnregister"


def test_a_handler_elsewhere_than_on_a_gpu_is_vllms() -> None:
    class Handler:
        """The shape of vLLM's class."""

        def __init__(self, max_num_reqs: int, num_speculative_steps: int, device: torch.device) -> None:
            self.broadcast_group: Any = SimpleNamespace(of=(max_num_reqs, num_speculative_steps))

    token_broadcast.install(Handler)
    made = Handler.__init__
    token_broadcast.install(Handler)
    assert Handler.__init__ is made
    assert Handler(8, 0, torch.device("cpu")).broadcast_group.of == (8, 0)
