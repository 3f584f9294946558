"""Common mistypings: the answer names the typed words, not the API's fields, and the command to look at."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from controlplane.cli.output import print_table
from controlplane.client.client import Client
from controlplane.errors import InvalidRequest
from testkit.client.command_line import Cli
from testkit.client.fake_api import FakeApi, answer, error


@pytest.mark.parametrize(
    ("argv", "said", "hint"),
    [
        (["infer"], "Missing argument 'model'.", "`ostinato infer --help` shows its arguments and options"),
        (["nosuch"], "No such command 'nosuch'.", "`ostinato --help` lists the commands"),
        (["status", "--url", "x"], "No such option: --url", "write --url before the command"),
        (["deploy", "m", "--intent", "fast"], "Invalid value for '--intent': 'fast' is not", "deploy --help"),
        (["register", "../x", "/tmp"], "NAME: expected a letter or digit, then up to 94", "register --help"),
        (["register", "x"], "Invalid value: give SOURCE (a base model)", "register --help"),
        (["register", "x", "--base", "b"], "Invalid value: give SOURCE (a base model)", "register --help"),
        (["register", "x", "--adapter", "a"], "Invalid value: give SOURCE (a base model)", "register --help"),
        (["infer", "m", ""], "TEXT: expected a text that is not empty, got an empty text", "infer --help"),
        (["infer", "m", "a\udcffb"], "TEXT: expected text in UTF-8, got other bytes", "infer --help"),
        (["--url", "http://h:99999", "models"], "Invalid value for --url: expected a port", "models --help"),
    ],
)  # fmt: skip
def test_a_mistyped_command_line_is_explained(
    argv: list[str], said: str, hint: str, cli: Cli, api: FakeApi
) -> None:
    ended = cli(*argv)
    assert ended.code == 2
    assert api.asked == []
    first, second = ended.err.splitlines()
    assert first.startswith(f"Error: {said}")
    assert hint in second


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_a_scenario_that_is_not_there(command: str, cli: Cli, tmp_path: Path) -> None:
    for file, said in ((tmp_path / "none", "No such file or directory"), (tmp_path, "Is a directory")):
        ended = cli(command, str(file))
        assert ended.err.startswith(f"Error: {file}: the YAML file cannot be read: {said}\n")


def test_a_password_in_the_url_is_not_printed(cli: Cli, nowhere: str) -> None:
    url = nowhere.replace("http://", "http://me:secret@")
    for flags in ((), ("--json",)):
        ended = cli("--url", url, *flags, "models")
        assert ended.code == 3
        assert nowhere in ended.err
        assert "secret" not in ended.err


def test_tls_that_the_server_does_not_speak_is_named(cli: Cli, api: FakeApi) -> None:
    ended = cli("--url", api.url.replace("http:", "https:"), "models")
    assert ended.code == 3
    assert "the TLS connection to" in ended.err
    assert "http://" in ended.err


def test_a_url_with_a_path_is_refused_with_the_reason(cli: Cli, api: FakeApi) -> None:
    said = "GET /v1/models: Not Found; GET /docs lists the calls"
    api.script("GET /models", answer(error("path_not_found", said), 404))
    ended = cli("models")
    assert ended.err.splitlines()[1].startswith(
        "Hint:  give --url without a path, such as http://127.0.0.1:8000"
    )


@pytest.mark.parametrize("name", ["", ".", "..", "a\udcff"])
@pytest.mark.parametrize("command", ["describe", "delete", "undeploy", "logs", "watch", "cancel"])
def test_an_invalid_name_does_not_become_another_call(
    command: str, name: str, cli: Cli, api: FakeApi
) -> None:
    ended = cli(command, name)
    assert ended.code == 1
    assert ended.err.startswith(("Error: expected a name, got ", "Error: expected a name in UTF-8, got "))
    assert len(ended.err.splitlines()) == 2
    assert api.asked == []


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("chat smol <&-", ""),
        ("infer smol - <&-", "Error: TEXT: expected a text that is not empty, got an empty text"),
        ("status >&-", ""),
        ("models --nosuch 2>&- >&-", ""),
    ],
)
def test_streams_that_the_caller_closed(call: str, said: str, api: FakeApi) -> None:
    command = shlex.join([sys.executable, "-m", "controlplane.cli.main", "--url", api.url])
    ended = subprocess.run(f"{command} {call}", check=False, shell=True, capture_output=True, text=True)
    assert ended.stderr.partition("\n")[0] == said


def test_a_table_on_a_narrow_terminal_is_a_block_for_each_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    print_table(["MODEL", "PHASE", "REASON"], [["smol", "Ready", ""], ["v1", "Failed", "no room"]], "none")
    assert (
        capsys.readouterr().out
        == "MODEL  smol\nPHASE  Ready\n\nMODEL   v1\nPHASE   Failed\nREASON  no room\n"
    )


@pytest.mark.parametrize("port", [0, 65_536, 99_999])
def test_a_client_needs_a_port_that_exists(port: int) -> None:
    with pytest.raises(InvalidRequest, match="from 1 to 65535"):
        Client(f"http://127.0.0.1:{port}")
