"""The reach of a user of this machine without a key and without Ray's token."""

from __future__ import annotations

import contextlib
import json
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import httpx
import psutil
import pytest

from controlplane import errors
from controlplane.runtime import local
from controlplane.runtime.front_door import environment
from testkit.cluster.clusters import GIVE_UP_S, Cluster, until
from testkit.cluster.served import BASE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

JOB = {"entrypoint": "touch /tmp/ostinato-was-here"}


def dashboard(cluster: Cluster, **headers: str) -> httpx.Client:
    return httpx.Client(base_url=cluster.local.dashboard_url, headers=headers, timeout=60, trust_env=False)


def submitted(cluster: Cluster) -> list[str]:
    """Jobs by their ids, but for our own start."""
    with dashboard(cluster, authorization=f"Bearer {local.ray_token(cluster.settings)}") as http:
        jobs = http.get("/api/jobs/").json()
    assert jobs
    return [job["submission_id"] for job in jobs if job["submission_id"]]


def ports_of(cluster: Cluster) -> set[tuple[str, int]]:
    """All that its processes listen on."""
    found: set[tuple[str, int]] = set()
    for process in cluster.processes():
        try:
            connections = process.net_connections(kind="tcp")
        except psutil.NoSuchProcess:
            continue
        found |= {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}
    return found


def test_ray_runs_nothing_for_a_stranger(echo_cluster: Cluster) -> None:
    for headers in ({}, {"authorization": "Bearer " + "0" * 64}):
        with dashboard(echo_cluster, **headers) as http:
            assert http.post("/api/jobs/", json=JOB).status_code in (401, 403)
            assert http.get("/api/jobs/").status_code in (401, 403)
            assert http.get("/api/serve/applications/").status_code in (401, 403)
    assert submitted(echo_cluster) == []


def test_no_other_port_of_ours_is_open(echo_cluster: Cluster) -> None:
    """Job and Serve APIs of Ray, asked of every port there is. Our own API has neither."""
    asked = sorted(ports_of(echo_cluster))
    assert len(asked) > 5
    with ThreadPoolExecutor(len(asked)) as pool:
        taken = [answer for answers in pool.map(_taken, asked) for answer in answers]
    assert taken == []
    assert submitted(echo_cluster) == []
    assert not Path("/tmp/ostinato-was-here").exists()


def _taken(port: tuple[str, int]) -> list[tuple[str, int]]:
    """Answers of one port that are no refusals."""
    where, found = _host(port), []
    for path in ("/api/jobs/", "/api/serve/applications/", "/api/job_agent/jobs/"):
        with contextlib.suppress(httpx.HTTPError):  # it does not speak HTTP
            reply = httpx.post(f"http://{where}{path}", json=JOB, timeout=20, trust_env=False)
            found.append((where + path, reply.status_code))
    return [(path, status) for path, status in found if status < 400]


# The answers of each kind of Ray's and Serve's servers to a caller with the token; an empty message asks for
# it.
CALLS = (
    "ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "ray.rpc.InternalKVGcsService/InternalKVKeys",
    "ray.rpc.JobInfoGcsService/GetAllJobInfo",
    "ray.rpc.NodeManagerService/GetNodeStats",
    "ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "ray.rpc.ObjectManagerService/Pull",
    "ray.rpc.ReporterService/GetTraceback",
    "ray.rpc.RayletDriver/Init",
    "ray.serve.ASGIService/HandleRequest",
    "ray.serve.RayServeAPIService/ListApplications",
)
# Those that are there for certain: the tests would see nothing, were these called otherwise.
SEEN = {CALLS[0], "ray.rpc.NodeManagerService/GetNodeStats", "ray.rpc.CoreWorkerService/GetCoreWorkerStats"}
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
REFUSED = {UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE}
PATHS = ("/", "/metrics", "/nodes", "/logs/", "/v1/models", "/get_runtime_envs_info")


def test_every_port_refuses_a_stranger_or_has_nothing_to_hide(echo_cluster: Cluster) -> None:
    """Over HTTP and gRPC. Not asked is the API, at HAProxy and at the gateway behind it: without a key it is
    open to this machine, as documented."""
    window = environment.of_one_machine(Path("/"), echo_cluster.local.mark)
    first, last = (int(window[f"RAY_SERVE_DIRECT_INGRESS_{end}_HTTP_PORT"]) for end in ("MIN", "MAX"))
    api = {urlsplit(echo_cluster.url).port, *range(first, last + 1)}
    asked = sorted(port for port in ports_of(echo_cluster) if port[1] not in api)
    with ThreadPoolExecutor(len(asked)) as pool:
        by_http = [answer for answers in pool.map(_answers_by_http, asked) for answer in answers]
        by_grpc = dict(zip(asked, pool.map(_answers_by_grpc, asked), strict=True))
    told = {(port, kind) for port, _, kind in by_http}
    print(
        "\n",
        *sorted(told),
        *((p, sorted(c.name for c in set(f.values()))) for p, f in by_grpc.items()),
        sep="\n",
    )
    page = urlsplit(echo_cluster.local.dashboard_url).port
    harmless = {"metrics", "health"}
    assert [each for each in by_http if each[2] not in harmless and each[:2] != (page, "/")] == []
    assert {"metrics"} <= {kind for _, kind in told}
    taken = {(p, call) for p, found in by_grpc.items() for call, code in found.items() if code not in REFUSED}
    assert taken == set()
    asking = {call for found in by_grpc.values() for call, code in found.items() if code is UNAUTHENTICATED}
    assert asking >= SEEN, asking


def _answers_by_http(port: tuple[str, int]) -> list[tuple[int, str, str]]:
    """(port, path, kind of answer) for a caller without a token at one port."""
    found = []
    with httpx.Client(base_url=f"http://{_host(port)}", timeout=20, trust_env=False) as http:
        for path in PATHS:
            with contextlib.suppress(httpx.HTTPError):  # it does not speak HTTP
                reply = http.get(path)
                if reply.status_code < 400:
                    found.append((port[1], path, _kind(reply.text)))
    return found


def _kind(text: str) -> str:
    if not text or text.startswith(("# HELP", "# TYPE")):
        return "metrics"
    return "health" if text.strip() in ("success", "ok") else text[:60]


def _answers_by_grpc(port: tuple[str, int]) -> dict[str, grpc.StatusCode]:
    """The outcome of each call, at one port, by a caller without the token."""
    with grpc.insecure_channel(_host(port), options=[("grpc.enable_http_proxy", 0)]) as channel:
        calls = {call: channel.unary_unary(f"/{call}").future(b"", timeout=20) for call in CALLS}
        return {call: future.code() for call, future in calls.items()}


def _host(port: tuple[str, int]) -> str:
    ip, number = port
    return f"[{ip}]:{number}" if ":" in ip else f"{ip}:{number}"


def test_a_driver_without_the_token_is_turned_away(echo_cluster: Cluster, tmp_path: Path) -> None:
    """Or tries for ever: it does so no longer here than one that has the token takes."""
    script = (
        "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False); print('connected', flush=True)"
    )
    command = [sys.executable, "-c", script, echo_cluster.local.ray_address]
    friend = local.cluster_environment(echo_cluster.settings)
    stranger = {n: v for n, v in friend.items() if n != "RAY_AUTH_TOKEN_PATH"} | {
        "HOME": str(tmp_path),
        "RAY_AUTH_MODE": "disabled",
    }
    with subprocess.Popen(command, env=stranger, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as outside:
        inside = subprocess.run(command, env=friend, capture_output=True, timeout=200, check=False)
        outside.kill()
        said, _ = outside.communicate()
    assert b"connected" in inside.stdout, inside.stderr.decode()
    assert b"connected" not in said


def test_the_token_and_rays_files_are_ours_alone(echo_cluster: Cluster) -> None:
    token = echo_cluster.settings.home / "ray-token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert stat.S_IMODE(Path(echo_cluster.local.temp_dir).parent.stat().st_mode) == 0o700
    secret = token.read_text()
    assert len(secret) == 64
    told = [
        *echo_cluster.settings.home.glob("*.log"),
        *Path(echo_cluster.local.temp_dir).glob("session_*/logs/*"),
    ]
    told = [path for path in told if path.is_file()]
    assert told
    assert [path for path in told if secret in path.read_text(errors="replace")] == []
    for process in echo_cluster.processes():
        try:
            assert secret not in " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue


def test_the_owner_gets_the_dashboard_s_address(echo_cluster: Cluster) -> None:
    start = "from controlplane.cli.main import main; main()"
    command = [sys.executable, "-c", start, "dashboard", "--json", "--home", str(echo_cluster.settings.home)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found == {"url": echo_cluster.local.dashboard_url, "token": local.ray_token(echo_cluster.settings)}


def test_the_dashboard_lists_the_applications(echo_cluster: Cluster) -> None:
    """Its first answer can take long: it starts an actor to ask Serve."""
    token = local.ray_token(echo_cluster.settings)

    def listed() -> bool:
        with dashboard(echo_cluster, authorization=f"Bearer {token}") as http:
            reply = http.get("/api/serve/applications/", timeout=GIVE_UP_S)
        assert reply.status_code == 200, reply.text
        states = {name: app["status"] for name, app in reply.json()["applications"].items()}
        assert states == {"ostinato": "RUNNING", f"model-{BASE}": "RUNNING"}
        return True

    until(listed, "the dashboard's list")


def test_ray_does_not_remember_each_report_of_an_agent(echo_cluster: Cluster) -> None:
    """There are several a second, and of what the GCS remembers of calls each takes 3 KB."""
    token = local.ray_token(echo_cluster.settings)

    def remembered() -> set[str]:
        with dashboard(echo_cluster, authorization=f"Bearer {token}") as http:
            reply = http.get("/api/v0/tasks?limit=10000", timeout=GIVE_UP_S)
        return {task["name"] for task in reply.json()["data"]["result"]["result"]}

    until(
        lambda: "probe" in remembered(), "a call that is remembered"
    )  # what devices can do is measured once
    assert not any("report" in name for name in remembered())


def test_the_front_door_does_not_read_a_head_without_end(echo_cluster: Cluster) -> None:
    where, sent = urlsplit(echo_cluster.url), 0
    with socket.create_connection((where.hostname, where.port), 60) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\nx-long: ")
        with contextlib.suppress(ConnectionError):
            while sent < 64 << 20:
                connection.sendall(b"a" * 65536)
                sent += 65536
    assert sent < 32 << 20  # sockets' buffers hold some
    assert echo_cluster.http.get("/healthz").status_code == 200


def test_another_user_s_folder_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(errors.Unavailable, match="another user"):
        local._make_private(tmp_path / "link")
    folder = tmp_path / "open"
    folder.mkdir(mode=0o777)
    local._make_private(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
