"""An answer leaves in few writes, and what is streamed leaves without delay."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from testkit.doors import HEAD, part
from testkit.workers.http1_connections import Wire, connected, turns
from workers.http1 import outgoing
from workers.http1.outgoing import Outgoing

REQUEST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"


def outgoing_to(wire: Wire) -> Outgoing:
    return Outgoing(wire, asyncio.get_running_loop(), unread_s=17.0)


async def test_a_whole_answer_is_one_write() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(HEAD)
        await send(part(b"one"))
        await send(part(b"two"))
        await send(part(b"", more=False))

    connection, wire = connected(app)
    for count in (1, 2):
        connection.data_received(REQUEST)
        await turns()
        assert len(wire.writes) == count
        head, _, body = wire.writes[-1].partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert body == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"


async def test_an_answer_is_written_when_it_is_complete_not_a_turn_later() -> None:
    seen: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(HEAD)
        seen.append(len(wire.writes))
        await send(part(b"all", more=False))
        seen.append(len(wire.writes))

    connection, wire = connected(app)
    connection.data_received(REQUEST)
    await turns()
    assert seen == [0, 1]


async def test_pieces_of_different_turns_are_not_held_back() -> None:
    go_on = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(HEAD)
        await send(part(b"one"))
        await go_on.wait()
        await send(part(b"two"))
        await send(part(b"", more=False))

    connection, wire = connected(app)
    connection.data_received(REQUEST)
    await turns()
    assert [w.rpartition(b"\r\n\r\n")[2] for w in wire.writes] == [b"3\r\none\r\n"]
    go_on.set()
    await turns()
    assert wire.writes[1:] == [b"3\r\ntwo\r\n0\r\n\r\n"]


async def test_much_data_is_not_gathered_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "GATHERED_BYTES", 100)
    wire = Wire()
    out = outgoing_to(wire)
    out.write(b"a" * 60)
    assert not wire.writes
    out.write(b"b" * 60)
    out.write(b"c")
    assert wire.writes == [b"a" * 60 + b"b" * 60]
    await turns()
    assert wire.writes[1:] == [b"c"]


async def test_gathered_data_leaves_before_the_connection_closes() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(HEAD)
        await send(part(b"all", more=False))

    connection, wire = connected(app)
    connection.data_received(REQUEST.replace(b"host: x", b"host: x\r\nconnection: close"))
    await turns()
    assert wire.closed
    assert wire.written.endswith(b"3\r\nall\r\n0\r\n\r\n")

    other, wire = connected(app)
    other.out.write(b"last words")
    other.close()
    await turns()
    assert (wire.writes, wire.closed) == ([b"last words"], True)


async def test_nothing_is_written_to_a_lost_connection_nor_waited_for() -> None:
    wire = Wire()
    out = outgoing_to(wire)
    out.pause()
    waiting = asyncio.create_task(out.drain())
    out.write(b"late")
    await asyncio.sleep(0)
    assert not waiting.done()
    wire.writes.clear()
    out.write(b"later")
    out.lost()
    await turns()
    assert (wire.writes, waiting.done()) == ([], True)
