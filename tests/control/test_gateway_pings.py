"""Pings between a proxy and a gateway: who hangs is found out, and who only takes long is left alone."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from ray import cloudpickle

from controlplane.runtime import app, gateway_pings

SILENT_S, EVERY_S = 1.0, 0.05
PINGS = 20  # without a word between them; gRPC's servers bear two
FOREVER_S = 3600.0
GIVE_UP_S = 300.0
OWN_TIMEOUT_S = 60.0  # of gRPC's pings, whatever keepalive is set to

# Like a replica of Serve's: it says at once that it has taken the request, and long after what came of it.
# {make} makes the server; it prints its port.
GATEWAY = """
import asyncio, ctypes, grpc, grpc.aio
{imports}

async def answer(request, context):
    await context.send_initial_metadata((("accepted", "1"),))
    if request.startswith(b"busy "):
        ctypes.PyDLL(None).usleep(int(1e6 * float(request[5:])))  # nothing else of Python's runs meanwhile
    else:
        await asyncio.sleep(float(request))
    yield b"done"

async def main():
    server = {make}
    handler = grpc.unary_stream_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("gateway", dict(ask=handler)),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()

asyncio.run(main())
"""
PLAIN = {"imports": "", "make": "grpc.aio.server()"}
OURS = {
    "imports": "from controlplane.runtime.gateway_pings import OF_SERVER",
    "make": "grpc.aio.server(options=OF_SERVER)",
}
OF_SERVE = {
    "imports": "import controlplane.runtime.app; from ray.serve._private import replica",
    "make": "replica.create_grpc_server_with_interceptors(asynchronous=True)",
}
Ask = Callable[..., Any]


@asynccontextmanager
async def gateway(
    how: dict[str, str], silent_s: float = GIVE_UP_S
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Ask]]:
    """Its process, and a call that it answers after so many seconds, through a proxy's channel."""
    code = GATEWAY.format(**how)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        address = f"127.0.0.1:{int(await process.stdout.readline())}"
        options = gateway_pings.of_channel(silent_s, EVERY_S)
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            call = channel.unary_stream("/gateway/ask")
            yield (
                process,
                lambda after_s, **more: call(str(after_s).encode(), **{"timeout": GIVE_UP_S, **more}),
            )
    finally:
        process.kill()
        await process.wait()


async def pieces(call: Any) -> list[bytes]:
    return [piece async for piece in call]


async def outcome(call: Any) -> list[bytes] | grpc.StatusCode:
    try:
        return await pieces(call)
    except grpc.aio.AioRpcError as e:
        return e.code()


async def test_a_gateway_that_hangs_loses_its_requests_and_gets_others_when_it_goes_on() -> None:
    async with gateway(OURS, SILENT_S) as (process, ask):
        taken = ask(FOREVER_S, timeout=OWN_TIMEOUT_S - 10.0)
        assert dict(await taken.initial_metadata())["accepted"] == "1"
        process.send_signal(signal.SIGSTOP)
        for call in (taken, ask(0)):  # the second is sent to one that is known to be away
            assert await outcome(call) is grpc.StatusCode.UNAVAILABLE
        process.send_signal(signal.SIGCONT)
        assert await pieces(ask(0, wait_for_ready=True)) == [b"done"]


@pytest.mark.parametrize("how", [OURS, OF_SERVE], ids=["ours", "one that Serve makes for our gateway"])
async def test_a_gateway_that_says_nothing_for_many_pings_is_waited_for(how: dict[str, str]) -> None:
    async with gateway(how) as (_, ask):
        assert await pieces(ask(PINGS * EVERY_S)) == [b"done"]


async def test_a_gateway_that_is_busy_answers_pings() -> None:
    """For several times as long as a silence may last nothing of Python's runs there."""
    async with gateway(OURS, 3 * SILENT_S) as (_, ask):  # a busy machine is silent for a moment as well
        assert await pieces(ask(f"busy {9 * SILENT_S}")) == [b"done"]


def test_a_replica_that_unpickles_our_gateway_bears_pings() -> None:
    """As Serve's replica does it before it makes its server; in a process that has nothing of ours yet."""
    found = "ray.serve._private.replica.create_grpc_server_with_interceptors.__module__"
    code = "import pickle, sys, ray.serve._private.replica; pickle.load(sys.stdin.buffer); "
    done = subprocess.run(
        [sys.executable, "-c", code + f"print({found})"],
        input=cloudpickle.dumps(app.Gateway.func_or_class),  # type: ignore[attr-defined]
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode().split()[-1] == gateway_pings.__name__


async def test_one_that_does_not_bear_pings_breaks_off() -> None:
    """So the tests above have pings to bear."""
    async with gateway(PLAIN) as (_, ask):
        with pytest.raises(grpc.aio.AioRpcError, match=r"(?i)too.many.pings"):
            await pieces(ask(FOREVER_S))
