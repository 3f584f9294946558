"""The refusals of `ostinato up` before it starts anything, and the recognition of its own cluster."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import requests
from ray._common.usage import usage_lib

from controlplane import errors
from controlplane.client.client import Client
from controlplane.runtime import local, start_checks
from controlplane.settings import Settings

ROOT = Path(__file__).resolve().parents[3]
CODE = ("controlplane", "workers", "placement", "profiler", "deploy")


def quiet(message: str) -> None:
    pass


# --- the loopback address ----------------------------------------------------------------------------


def test_a_machine_without_the_loopback_address_gets_the_remedy() -> None:
    """In a network namespace of its own the loopback device is down, and has no address."""
    check = "from controlplane.runtime import start_checks; start_checks.require_loopback()"
    in_namespace = ["unshare", "--net", "--"]
    if subprocess.run([*in_namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may make no network namespace")
    found = subprocess.run(
        [*in_namespace, sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "ip addr add 127.0.0.1/8 dev lo" in found.stderr, found.stderr
    start_checks.require_loopback()


# --- names of variables ------------------------------------------------------------------------------


def test_every_variable_that_the_code_names_is_known() -> None:
    named = set()
    for folder in CODE:
        for file in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("Dockerfile")]:
            named |= set(re.findall(r"OSTINATO_[A-Z_]*[A-Z]", file.read_text()))
    assert "OSTINATO_HOME" in named
    assert start_checks.unknown_variables(named) == {}


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("OSTINATO_MAX_MODEL_LENGTH", "OSTINATO_MAX_MODEL_LEN"),
        ("OSTINATO_ALLOWED_ROOT", "OSTINATO_ALLOWED_ROOTS"),
        ("OSTINATO_HTP_PORT", "OSTINATO_HTTP_PORT"),
        ("OSTINATO_COLOUR", ""),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_nearest_name(name: str, near: str) -> None:
    assert start_checks.unknown_variables(["PATH", "OSTINATO_HOME", name]) == {name: near}
    with pytest.raises(errors.InvalidRequest, match=near or name):
        start_checks.require_known_variables([name])


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("MERGED_SLOT", "use engine.mergedSlot of a deployment"),
        ("PROFILE", "set OSTINATO_PROFILE_SECONDS=0 to measure nothing"),
        ("ECHO_TPOT_S", "set OSTINATO_ENGINE=echo:S"),
        ("BODY_TIMEOUT_S", "its value is fixed"),
    ],
)
def test_a_setting_of_an_earlier_version_is_refused_with_its_new_place(name: str, place: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=f"OSTINATO_{name} is no longer a setting .{place}.;"):
        start_checks.require_known_variables([f"OSTINATO_{name}"])


def test_removed_settings_are_not_read() -> None:
    gone = {*start_checks.OF_DEPLOYMENTS, *start_checks.NOW, *start_checks.FIXED}
    assert not gone & {name.removeprefix("OSTINATO_") for name in start_checks.setting_names()}
    assert len(start_checks.setting_names()) <= 39  # four of them bound the sources of models


def test_variables_that_kubernetes_sets_for_a_service_are_no_misspelling() -> None:
    links = [
        "SERVICE_HOST",
        "SERVICE_PORT",
        "SERVICE_PORT_HTTP",
        "PORT",
        "PORT_8000_TCP",
        "PORT_8000_TCP_ADDR",
    ]
    start_checks.require_known_variables([f"OSTINATO_HEAD_SVC_{link}" for link in links])


# --- the home ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["a file", "below a file", "not ours"])
def test_a_home_that_cannot_be_written_is_named(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    homes = {
        "a file": tmp_path / "file",
        "below a file": tmp_path / "file" / "home",
        "not ours": Path("/proc/home"),
    }
    with pytest.raises(errors.Unavailable, match="OSTINATO_HOME") as refused:
        local.up(Settings(home=homes[kind]), quiet)
    assert str(homes[kind]) in refused.value.message


def test_an_error_of_the_disk_is_no_defect(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code = "from controlplane.cli.main import main; main()"
    environment = {**os.environ, "OSTINATO_HOME": str(tmp_path / "file")}
    command = [sys.executable, "-c", code, "down"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"{tmp_path}/file" in done.stderr
    assert "defect" not in done.stderr


# --- who answers on the port ---------------------------------------------------------------------------


class Stranger(BaseHTTPRequestHandler):
    """Answers everything with 200."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def stranger() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Stranger)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_stranger_on_the_port_of_a_cluster_that_ended_is_not_taken_for_it(
    stranger: int, tmp_path: Path
) -> None:
    settings = Settings(home=tmp_path, http_port=stranger, engine="echo")
    ended = local.LocalCluster(str(tmp_path), settings.local_url, "", "127.0.0.1:1", "/tmp/none", "none")
    (tmp_path / "cluster.json").write_text(json.dumps(asdict(ended)))
    assert local.find(settings) is None
    said: list[str] = []
    with pytest.raises(errors.Unavailable, match=f"cannot listen on 127.0.0.1:{stranger}"):
        local.up(settings, said.append)
    assert said == []
    assert not (tmp_path / "supervisor.json").exists()


def test_other_settings_than_those_of_the_running_cluster_are_named(tmp_path: Path) -> None:
    running = Settings(home=tmp_path, max_model_len=2048, api_key="first-secret-key")
    start_checks.require_same_settings(running, running.as_env())
    older = {name: value for name, value in running.as_env().items() if name != "OSTINATO_HEADROOM"}
    start_checks.require_same_settings(running, older)
    asked = running.model_copy(update={"max_model_len": 4096, "api_key": "second-secret-key"})
    with pytest.raises(errors.InvalidRequest, match="ostinato down") as refused:
        start_checks.require_same_settings(asked, running.as_env())
    assert "OSTINATO_MAX_MODEL_LEN is '2048' there, but '4096' is set now" in refused.value.message
    assert "OSTINATO_API_KEY" in refused.value.message
    assert "secret-key" not in refused.value.message


# --- keys ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["s3cret-key-of-mine\n", " s3cret-key-of-mine", "s3cret\r\nkey", "schlüssel-s3cret"]
)
def test_a_key_that_no_client_can_send_is_refused_and_not_printed(key: str, tmp_path: Path) -> None:
    code = "from controlplane.cli.main import main; main()"
    environment = {**os.environ, "OSTINATO_HOME": str(tmp_path), "OSTINATO_API_KEY": key}
    for command in ("up", "status"):
        done = subprocess.run(
            [sys.executable, "-c", code, command],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert "line break" in done.stderr
        assert "s3cret" not in done.stderr + done.stdout
    with pytest.raises(errors.InvalidRequest, match="line break"):
        Client(api_key=key)


# --- addresses and proxies -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000"),
        ("::", "http://[::1]:8000"),
        ("gpu-7", "http://gpu-7:8000"),
    ],
)
def test_the_api_is_reached_at_the_address_where_it_listens(host: str, url: str) -> None:
    assert Settings(http_host=host).local_url == url


def test_ports_of_ipv6_are_looked_at(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET6) as held:
        held.bind(("::1", 0))
        held.listen()
        settings = Settings(home=tmp_path, http_host="::1", http_port=held.getsockname()[1], engine="echo")
        with pytest.raises(errors.Unavailable, match="--port"):
            local.up(settings, quiet)
    with pytest.raises(errors.Unavailable, match="no-such-host"):
        local.up(Settings(home=tmp_path, http_host="no-such-host.invalid", engine="echo"), quiet)


LISTENER = """
import socket, time
held = socket.create_server(("127.0.0.1", 0))
print(held.getsockname()[1], flush=True)
time.sleep(1000)
"""


def test_a_leftover_of_an_earlier_run_that_holds_the_port_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[bool] = []

    def start(
        settings: Settings, progress: local.Progress, cluster: local.LocalCluster
    ) -> local.LocalCluster:
        started.append(local._refusal("127.0.0.1", settings.http_port) is None)
        return cluster

    monkeypatch.setattr(local, "_start", start)
    marked = os.environ | {local.MARK: local._mark(Settings(home=tmp_path))}
    command = [sys.executable, "-c", LISTENER]
    with subprocess.Popen(command, env=marked, stdout=subprocess.PIPE, text=True) as leftover:
        assert leftover.stdout is not None
        port = int(leftover.stdout.readline())
        settings = Settings(home=tmp_path, http_port=port, engine="echo", dashboard=False)
        local.up(settings, quiet, supervised=False)
    assert started == [True]


def test_no_process_of_the_cluster_asks_a_proxy_for_this_machine() -> None:
    given = {"http_proxy": "http://proxy:3128", "NO_PROXY": "example.com, 127.0.0.1"}
    found = start_checks.without_proxies(given)
    assert found["no_proxy"] == found["NO_PROXY"] == "example.com,127.0.0.1,localhost,::1"
    assert local.ray_switches()["grpc_proxy"] == ""


def test_rays_report_that_reports_are_off_has_nowhere_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in local.ray_switches().items():
        monkeypatch.setenv(name, value)
    assert not usage_lib.usage_stats_enabled()
    report = usage_lib.generate_disabled_report_data()
    with pytest.raises(requests.exceptions.InvalidSchema):
        usage_lib.UsageReportClient().report_usage_data(usage_lib._usage_stats_report_url(), report)


def test_a_proxy_that_would_take_clients_requests_is_reported() -> None:
    url, proxy = "http://127.0.0.1:8000", {"HTTP_PROXY": "http://proxy:3128"}
    assert "export no_proxy=127.0.0.1,localhost`" in start_checks.proxy_hint(proxy, url)
    others = {**proxy, "no_proxy": "example.com"}
    assert "export no_proxy=example.com,127.0.0.1,localhost`" in start_checks.proxy_hint(others, url)
    assert "no_proxy=::1" in start_checks.proxy_hint(proxy, "http://[::1]:8000")
    assert start_checks.proxy_hint({**proxy, "no_proxy": "localhost,127.0.0.1"}, url) == ""
    assert start_checks.proxy_hint({}, url) == ""
