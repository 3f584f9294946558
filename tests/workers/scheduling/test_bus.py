"""Messages between a scheduler and its ranks, over real sockets."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from profiler.errors import CheckpointError
from workers.bus.client import VariantClient, new_address
from workers.bus.faults import Fault, LoadFailed, fault_of
from workers.bus.sockets import Message, RankSocket, SchedulerSocket, with_token

WAIT_S = 60


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/bus"


class Inbox:
    """The messages that one end has received, in order."""

    def __init__(self) -> None:
        self.all: queue.Queue[Any] = queue.Queue()

    def at_scheduler(self, sender: bytes, message: Message) -> None:
        self.all.put((sender, message))

    def at_rank(self, message: Message) -> None:
        self.all.put(message)

    def take(self, count: int) -> list[Any]:
        return [self.all.get(timeout=WAIT_S) for _ in range(count)]


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture(name="scheduler_socket")
def a_scheduler_socket(address: str, inbox: Inbox) -> Iterator[SchedulerSocket]:
    made = SchedulerSocket(address, inbox.at_scheduler)
    yield made
    made.close()


def test_messages_of_every_line_arrive_in_order(
    address: str, scheduler_socket: SchedulerSocket, inbox: Inbox
) -> None:
    rank_sockets = [RankSocket(address, f"rank-{n}", print) for n in range(8)]
    for number in range(100):
        for rank_socket in rank_sockets:
            rank_socket.send({"number": number})
    received = inbox.take(800)
    for n in range(8):
        assert [m["number"] for s, m in received if s == f"rank-{n}".encode()] == list(range(100))
    for rank_socket in rank_sockets:
        rank_socket.close()


def test_messages_to_a_line_arrive_there_in_order(
    address: str, scheduler_socket: SchedulerSocket, inbox: Inbox
) -> None:
    inboxes = [Inbox() for _ in range(4)]
    rank_sockets = [RankSocket(address, f"rank-{n}", box.at_rank) for n, box in enumerate(inboxes)]
    for rank_socket in rank_sockets:
        rank_socket.send({"did": "hello"})
    senders = [sender for sender, _ in inbox.take(4)]
    for number in range(200):
        for sender in senders:
            scheduler_socket.send(sender, {"to": sender.decode(), "number": number})
    for n, box in enumerate(inboxes):
        assert box.take(200) == [{"to": f"rank-{n}", "number": number} for number in range(200)]
    for rank_socket in rank_sockets:
        rank_socket.close()


def test_a_rank_may_be_there_before_its_scheduler(address: str, inbox: Inbox) -> None:
    early = Inbox()
    rank_socket = RankSocket(address, "rank-0", early.at_rank)
    rank_socket.send({"did": "hello"})
    scheduler_socket = SchedulerSocket(address, inbox.at_scheduler)
    ((sender, message),) = inbox.take(1)
    assert message == {"did": "hello"}
    scheduler_socket.send(sender, {"do": "prepare"})
    assert early.take(1) == [{"do": "prepare"}]
    rank_socket.close()
    scheduler_socket.close()


def test_a_bad_message_or_handler_does_not_end_the_thread(address: str) -> None:
    seen = Inbox()

    def handle(sender: bytes, message: Message) -> None:
        if message["number"] == 1:
            raise KeyError("of a handler")
        seen.at_scheduler(sender, message)

    scheduler_socket = SchedulerSocket(address, handle)
    stranger: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    stranger.connect(address)
    for parts in (
        [b"not json"],
        [b"", b"not json"],
        [b"", b"\xff\xfe"],
        [b"{}", b"{}"],
        [b""],
        [b"[]"],
        [b"", b'{"number": 1}'],
    ):
        stranger.send_multipart(parts)
    stranger.send_multipart([b"", b'{"number": 2}'])
    ((sender, message),) = seen.take(1)
    assert message == {"number": 2}
    scheduler_socket.send(b"nobody", {})  # of that name: lost, as for a rank that has gone
    scheduler_socket.send(sender, {"number": 3})
    assert stranger.poll(WAIT_S * 1000)
    assert stranger.recv() == b'{"number": 3}'
    stranger.close(linger=0)
    scheduler_socket.close()


def test_a_sender_without_the_address_s_token_is_ignored(inbox: Inbox) -> None:
    address = with_token(f"tcp://127.0.0.1:{free_port()}")
    place, _, token = address.partition("#")
    scheduler_socket = SchedulerSocket(address, inbox.at_scheduler)
    stranger: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    stranger.connect(place)
    known, body = token.encode(), b'{"did": "harm"}'
    for parts in ([body], [known], [b"", body], [known[:-1], body], [b"0" * 32, body], [known, body, body]):
        stranger.send_multipart(parts)
    stranger.send_multipart([known, b'{"number": 1}'])  # the messages of a socket keep their order
    ((_, message),) = inbox.take(1)
    assert message == {"number": 1}
    told = RankSocket(address, "rank-0", print)
    told.send({"did": "hello"})
    assert inbox.take(1) == [(b"rank-0", {"did": "hello"})]
    told.close()
    scheduler_socket.close()
    stranger.close(linger=0)


def test_tokens_are_of_their_address_alone() -> None:
    one, other = with_token("tcp://10.0.0.1:4002"), with_token("tcp://10.0.0.1:4002")
    assert one != other
    assert len(one.partition("#")[2]) >= 32


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def test_a_bad_message_does_not_end_a_lines_thread(address: str) -> None:
    router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(address)
    seen = Inbox()
    rank_socket = RankSocket(address, "rank-0", seen.at_rank)
    rank_socket.send({})
    sender, *_ = router.recv_multipart()
    for parts in ([b"not json"], [b"{}", b"{}"], [b'{"number": 2}']):
        router.send_multipart([sender, *parts])
    assert seen.take(1) == [{"number": 2}]
    rank_socket.close()
    router.close(linger=0)


def test_a_handler_may_send_more_than_any_queue_would_hold(address: str) -> None:
    """All orders since the start go out when the last rank says hello, from the socket's own thread."""
    count = 20_000

    def greet(sender: bytes, message: Message) -> None:
        for number in range(count):
            scheduler_socket.send(sender, {"number": number})

    scheduler_socket = SchedulerSocket(address, greet)
    seen = Inbox()
    rank_socket = RankSocket(address, "rank-0", seen.at_rank)
    rank_socket.send({"did": "hello"})
    assert [m["number"] for m in seen.take(count)] == list(range(count))
    rank_socket.close()
    scheduler_socket.close()


def test_closing_ends_the_threads_and_frees_the_address(address: str, inbox: Inbox) -> None:
    def threads() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name.startswith("variant-")}

    before = threads()  # of tests before
    for _ in range(3):
        scheduler_socket = SchedulerSocket(address, inbox.at_scheduler)
        rank_socket = RankSocket(address, "rank-0", print)
        rank_socket.send({"did": "hello"})
        inbox.take(1)
        assert threads() - before
        rank_socket.close()
        scheduler_socket.close()
        assert threads() <= before


async def test_a_client_gets_the_answer_to_its_own_question() -> None:
    address = new_address()
    faults: dict[str, str] = {}

    def answer(sender: bytes, message: Message) -> None:
        if message["ask"] == "prepare":
            error = "" if message["path"] == "/good" else "no such folder"
            fault = faults.get(message["path"], "")
            scheduler_socket.send(sender, {"id": message["id"], "error": error, "fault": fault})
        elif message["ask"] == "limit":
            scheduler_socket.send(sender, {"id": "of somebody else", "limit": 0})
            scheduler_socket.send(sender, {"id": message["id"], "limit": message["limit"] + 1})

    scheduler_socket = SchedulerSocket(address, answer)
    client = VariantClient(address)
    await client.prepare(1, "/good")
    with pytest.raises(ValueError, match="no such folder"):
        await client.prepare(2, "/bad")
    for fault, kind in (
        (Fault.FILES, CheckpointError),
        (Fault.VARIANT, ValueError),
        (Fault.ENGINE, LoadFailed),
    ):
        faults["/worse"] = fault
        with pytest.raises(kind, match="no such folder") as failure:
            await client.prepare(3, "/worse")
        assert type(failure.value) is kind
        assert fault_of(failure.value) is fault
    assert await client.limit(3) == 4
    with pytest.raises(TimeoutError):
        await client.state(timeout_s=0.05)
    client.close()
    scheduler_socket.close()
