from __future__ import annotations

import io
import socket
import sys
from collections.abc import Iterator

import pytest

from controlplane.cli import main as cli_main
from testkit.client.command_line import Cli, Ended
from testkit.client.fake_api import FakeApi, serve


@pytest.fixture(scope="session")
def running_api() -> Iterator[FakeApi]:
    yield from serve(FakeApi())


@pytest.fixture
def api(running_api: FakeApi) -> FakeApi:
    """The server with its default script and nothing asked yet."""
    running_api.reset()
    return running_api


@pytest.fixture
def nowhere() -> Iterator[str]:
    """A URL at which nothing answers: its port is taken, but no process listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def cli(api: FakeApi, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("OSTINATO_URL", api.url)

    def run(*argv: str, stdin: str = "") -> Ended:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = cli_main.run(argv)
        out, err = capfd.readouterr()
        return Ended(code, out, err)

    return run
