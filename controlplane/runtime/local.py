"""A local cluster: one Ray head node, Ray Serve on it, and the application `ostinato`.

`up` returns when the API answers. The cluster then runs until `down`, which ends every process of the cluster
and no other (another Ray on the same machine is left alone). A supervisor starts the cluster again when its
head dies.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import httpx
import psutil

from controlplane import errors
from controlplane.gateway.tenants_file import tenants_of
from controlplane.runtime import loopback, start_checks, supervision, supervisor_process
from controlplane.runtime.front_door import environment
from controlplane.runtime.patches.ray import serve_news
from controlplane.settings import Settings
from controlplane.state.installation import Missing, identity_of
from controlplane.state.stores import open_store
from workers.engine import torch_check

Progress = Callable[[str], None]

START_TIMEOUT_S = 600.0  # a limit for starts that hang: a busy machine takes minutes
START_TRIES = 6
STOP_TIMEOUT_S = 30.0
KINDLY_S = 4.0  # killing a process loses no acknowledged data
WITHOUT_HEAD_S = 2.0  # without a head, processes wait for it and do not end
CORES_FOR_TWO_GATEWAYS = 4
# Every process of the cluster inherits this variable; `down` finds the processes by it.
MARK = "OSTINATO_CLUSTER"
NICENESS = "RAY_worker_niceness"
# Ray's command line as a module: the program `ray` may be missing, for instance after `pip install --target`.
# All steps of a start run unbuffered, so that a log's last line is the step's last output.
RAY = (sys.executable, "-u", "-m", "ray.scripts.scripts")


@dataclass(frozen=True)
class LocalCluster:
    """A running local cluster: the addresses of its API and dashboard ("": no dashboard), and its state
    store's identity."""

    home: str
    url: str
    dashboard_url: str
    ray_address: str
    temp_dir: str
    mark: str
    installation: str = ""


def up(
    settings: Settings, progress: Progress, dashboard_port: int = 0, *, supervised: bool = True
) -> LocalCluster:
    """Start the cluster, or find the running cluster. `supervised`: start a background process that
    restarts the cluster when its head dies. Errors: Unavailable with the reason; InvalidRequest when a
    cluster runs with other settings."""
    settings = with_gateways(settings)
    cluster = find(settings)
    if cluster is not None:
        start_checks.require_same_settings(settings, _running_environment(settings))
        progress(f"already running at {cluster.url}")
    else:
        cluster = _first_start(settings, progress, dashboard_port)
    if supervised:
        supervisor_process.start(settings, _unmarked_environment(settings))
    return cluster


def start_again(settings: Settings, progress: Progress) -> None:
    """Restart the cluster after its head died: end its remaining processes, and start it at the same ports
    if they are free. Errors: Unavailable, also when the state store holds another installation, because no
    user is present to confirm that."""
    _require_same_state(settings)
    end_leftovers(settings, progress, kindly_s=WITHOUT_HEAD_S)
    _require_free_port(settings.http_host, settings.http_port)
    _start(settings, progress, _describe_again(settings))


def _first_start(settings: Settings, progress: Progress, dashboard_port: int) -> LocalCluster:
    _check_tenants(settings)
    _check_torch(settings)
    start_checks.require_home(settings)
    start_checks.require_loopback()
    end_leftovers(settings, progress)
    _require_free_port(settings.http_host, settings.http_port)  # a leftover may have held it
    return _start(settings, progress, _describe(settings, dashboard_port))


def _start(settings: Settings, progress: Progress, cluster: LocalCluster) -> LocalCluster:
    make_folder(cluster.mark)
    try:
        progress("starting a Ray node")
        _start_node(cluster, settings, progress)
        progress("deploying the control plane on Ray Serve")
        _deploy(cluster, settings)
        progress("waiting for the API")
        _wait_ready(cluster, settings)
    except BaseException:
        end_leftovers(settings, progress)
        raise
    with contextlib.suppress(errors.Unavailable):  # the cluster runs; only a later restart needs the identity
        cluster = replace(cluster, installation=_installation(settings))
    _file(settings).write_text(json.dumps(asdict(cluster), indent=1))
    dashboard = cluster.dashboard_url or "none"
    progress(f"ready: {cluster.url}  (API docs {cluster.url}/docs, Ray dashboard {dashboard})")
    if hint := start_checks.proxy_hint(os.environ, cluster.url):
        progress(hint)
    return cluster


def _installation(settings: Settings) -> str:
    """The identity of the state store; empty: no store exists."""
    try:
        with contextlib.closing(open_store(settings.resolved_store_url, must_exist=True)) as store:
            return identity_of(store)
    except Missing:
        return ""


def _require_same_state(settings: Settings) -> None:
    last = _last(settings)
    if last is not None and last.installation and _installation(settings) != last.installation:
        raise errors.Unavailable(
            f"the state of this cluster (installation {last.installation}) is no longer in its store; "
            "restore the store, and the cluster starts again, or start with the present store: run `ostinato "
            "down`, then `ostinato up`"
        )


def find(settings: Settings) -> LocalCluster | None:
    """The cluster of this home, if its head lives and its API answers. Another program may have its port."""
    cluster = _last(settings)
    if cluster is None or head_processes(settings).keys() != set(supervision.HEAD):
        return None
    return cluster if _answers(cluster.url) else None


def _running_environment(settings: Settings) -> dict[str, str]:
    """The environment of a process of this home's cluster, as the process was started; empty: no process
    can be read."""
    for process in head_processes(settings).values():
        with contextlib.suppress(psutil.Error):
            return process.environ()
    return {}


def _last(settings: Settings) -> LocalCluster | None:
    """The cluster of this home that was started last, running or not."""
    try:
        return LocalCluster(**json.loads(_file(settings).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def head_processes(settings: Settings) -> dict[str, psutil.Process]:
    """The processes of this home's cluster that it cannot run without, by their names of
    `supervision.HEAD`."""
    named = ((_name(process), process) for process in _marked(_mark(settings)))
    return {name: process for name, process in named if name in supervision.HEAD}


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def with_gateways(settings: Settings, cores: int | None = None) -> Settings:
    """Settings with two gateways if the number is not set and the machine has enough cores. If one gateway
    ends, a client only retries, and does not wait seconds for another to start."""
    if "gateway_replicas" in settings.model_fields_set:
        return settings
    many = (cores or _cores()) >= CORES_FOR_TWO_GATEWAYS
    return settings.model_copy(update={"gateway_replicas": 2 if many else 1})


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_torch(settings: Settings) -> None:
    """Raise Unavailable when torch cannot be imported, so that no engine could start. A separate process
    imports torch, which takes seconds; the check runs only if torch has companion packages."""
    if not settings.is_vllm or not torch_check.has_companions():
        return
    command = [sys.executable, "-m", "workers.engine.torch_check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise errors.Unavailable(done.stdout.strip() or f"torch cannot be imported: {done.stderr[-300:]}")


def down(settings: Settings, progress: Progress) -> bool:
    """End every process of this home's cluster; False when there was none."""
    progress("stopping the local cluster")
    ended = end_leftovers(settings, progress)
    _file(settings).unlink(missing_ok=True)
    return ended


def end_leftovers(settings: Settings, progress: Progress, kindly_s: float = KINDLY_S) -> bool:
    """End all processes that carry this home's mark, first with SIGTERM. The supervisor ends before them:
    it would start them again."""
    supervisor_process.end(settings)
    mark = _mark(settings)
    leftovers = _marked(mark)
    _signal(leftovers, signal.SIGTERM)
    psutil.wait_procs([process for process in leftovers if not _is_gcs(process)], timeout=kindly_s)
    alive = list(_marked(mark))  # includes the processes of a start that was under way
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while alive and time.monotonic() < deadline:
        _signal(alive, signal.SIGKILL)
        _, alive = psutil.wait_procs(alive, timeout=5)
        alive = [*alive, *_marked(mark)]
    if alive:
        raise errors.Unavailable(
            f"the processes {[p.pid for p in alive]} do not end; end them with `kill -9`"
        )
    shutil.rmtree(_temp_dir(mark).parent, ignore_errors=True)
    if leftovers:
        progress(f"ended {len(leftovers)} leftover processes")
    return bool(leftovers)


def _is_gcs(process: psutil.Process) -> bool:
    """Tell whether this is Ray's control store: it takes too long to end by itself, and keeps nothing
    here."""
    try:
        return process.name() == "gcs_server"
    except psutil.NoSuchProcess:
        return False


def _signal(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _marked(mark: str) -> set[psutil.Process]:
    """The cluster's processes: the processes with the mark, and their descendants. (Ray's agents and
    workers rename themselves, which overwrites the environment that other processes can read.)"""
    marked: set[psutil.Process] = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                marked |= {process, *process.children(recursive=True)}
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return {p for p in marked if p.pid != os.getpid()}


def _mark(settings: Settings) -> str:
    return hashlib.sha256(str(settings.home).encode()).hexdigest()[:12]


def _temp_dir(mark: str) -> Path:
    """Ray's folder. A socket's path may have 107 characters, so keep it short. Ray lets every user read
    this folder; the folder around it is private."""
    return Path(f"/tmp/ostinato-{mark}/r")


def make_folder(mark: str) -> None:
    """Make the private folder around Ray's, with the program that Serve starts as HAProxy. Errors:
    Unavailable."""
    folder = _temp_dir(mark).parent
    _make_private(folder)
    environment.write_program(folder, sys.executable)


def _make_private(folder: Path) -> None:
    """Make a private folder. Errors: Unavailable when another user made it: its name is predictable."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise errors.Unavailable(
                f"{folder} belongs to another user, expected a folder of this user; remove it, or choose "
                "another --home (OSTINATO_HOME)"
            ) from None
        folder.chmod(0o700)


def _file(settings: Settings) -> Path:
    return settings.home / "cluster.json"


def _describe(settings: Settings, dashboard_port: int = 0, ray_port: int = 0) -> LocalCluster:
    """The cluster to start. A port of 0 means a free port."""
    mark = _mark(settings)
    first, second, *_ = (p for p in free_ports(3) if p != settings.http_port)
    first, dashboard = ray_port or first, dashboard_port or second
    return LocalCluster(
        home=str(settings.home),
        url=settings.local_url,
        dashboard_url=f"http://127.0.0.1:{dashboard}" if settings.dashboard else "",
        ray_address=f"127.0.0.1:{first}",
        temp_dir=str(_temp_dir(mark)),
        mark=mark,
    )


def _describe_again(settings: Settings) -> LocalCluster:
    """The cluster to restart, with the ports of the last start that are free."""
    if (last := _last(settings)) is None:
        return _describe(settings)
    ports = (int(_port(last.dashboard_url) or 0), int(_port(last.ray_address)))
    dashboard, ray = (port if _refusal(loopback.LOOPBACK, port) is None else 0 for port in ports)
    return _describe(settings, dashboard, ray)


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Different free ports. The kernel may give the same port twice if asked one after the other."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _check_tenants(settings: Settings) -> None:
    """Check the tenants before the start: Serve would restart a gateway that cannot read them again and
    again.

    Errors: InvalidRequest.
    """
    try:
        tenants_of(settings)
    except ValueError as e:
        raise errors.InvalidRequest(str(e)) from e


def _require_free_port(host: str, port: int) -> None:
    if (refusal := _refusal(host, port)) is not None:
        raise errors.Unavailable(
            f"Ostinato cannot listen on {host}:{port} ({refusal.strerror}); choose another port with --port"
        ) from refusal


def _refusal(host: str, port: int) -> OSError | None:
    """The error of listening there; None: listening is possible."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(address)
    except OSError as e:
        return e
    return None


def _unmarked_environment(settings: Settings) -> dict[str, str]:
    """The environment of a process that belongs to no cluster and has these settings."""
    return {name: value for name, value in os.environ.items() if name != MARK} | settings.as_env()


def cluster_environment(settings: Settings) -> dict[str, str]:
    """The environment of the cluster's processes: our settings, and Ray's switches for the request path."""
    mark = _mark(settings)
    return {
        # another cluster's token
        **{name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN"},
        **start_checks.without_proxies(os.environ),
        **settings.as_env(),
        **ray_switches(),
        **environment.of_one_machine(_temp_dir(mark).parent, mark),
        **ray_authentication(settings),
        MARK: mark,
        "RAY_TMPDIR": str(_temp_dir(mark)),
    }


def ray_authentication(settings: Settings) -> dict[str, str]:
    """The variables for Ray's token, made now if it does not exist. Any process that Ray accepts may run
    any code as this user. So Ray requires a token, from a file of this home that other users cannot read."""
    settings.home.mkdir(parents=True, exist_ok=True, mode=0o700)
    where = settings.home / "ray-token"
    if not where.exists():
        _write_token(where)
    found = where.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise errors.Unavailable(
            f"expected {where} to belong to this user, with mode 600; other users could read or replace it: "
            "remove it"
        )
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(where)}


def _write_token(where: Path) -> None:
    """Write the whole token or nothing, also if another process writes it now."""
    part = where.with_name(f"{where.name}.{os.getpid()}")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    with contextlib.suppress(FileExistsError):
        os.link(part, where)
    part.unlink()


def ray_token(settings: Settings) -> str:
    """The token of this home's cluster. Raises OSError where no cluster was started from this home."""
    return (settings.home / "ray-token").read_text()


def ray_switches() -> dict[str, str]:
    """Ray's settings, which it reads from the environment when a process starts."""
    return {
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        **environment.EVERYWHERE,
        # The interval at which processes ask again for news of replicas (`serve_news`).
        "LISTEN_FOR_CHANGE_REQUEST_TIMEOUT_S_LOWER_BOUND": str(serve_news.ANSWERS_S[0]),
        "LISTEN_FOR_CHANGE_REQUEST_TIMEOUT_S_UPPER_BOUND": str(serve_news.ANSWERS_S[1]),
        # gRPC, which connects Ray's processes, would use `http_proxy` for other nodes and for this machine.
        # An empty value means no proxy.
        "grpc_proxy": "",
        **loopback.ENVIRONMENT,
        # Ray would run gateways, controller and engines at niceness 15. Other processes on this machine would
        # get thirty times their share.
        NICENESS: os.environ.get(NICENESS, "0"),
        # Even when usage reports are off, Ray's dashboard sends that fact to an external address. This is not
        # an address.
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_USAGE_STATS_REPORT_URL": "none:",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_DEDUP_LOGS": "0",
        # A busy machine takes minutes to start what an idle one starts in seconds.
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "300",
        "RAY_NUM_REDIS_GET_RETRIES": "120",
        # Ray's GCS remembers this number of calls, 3 KB each. The default is ten times higher.
        "RAY_task_events_max_num_task_in_gcs": "10000",
    }


def _start_node(cluster: LocalCluster, settings: Settings, progress: Progress) -> None:
    """Start Ray, with more tries on a busy machine. Ray waits 30 s for a node to register, and has no
    setting to wait longer. Errors: Unavailable."""
    for left in reversed(range(START_TRIES)):
        try:
            _start_ray(cluster, settings)
        except errors.Unavailable as e:
            if left == 0 or "timed out during startup" not in e.message:
                raise
        else:
            return
        progress(f"Ray did not start within 30 s; trying again, at most {left} more times")
        end_leftovers(settings, progress)
        make_folder(cluster.mark)


def _start_ray(cluster: LocalCluster, settings: Settings) -> None:
    command = [
        *RAY,
        "start",
        "--head",
        f"--node-ip-address={loopback.LOOPBACK}",
        f"--port={_port(cluster.ray_address)}",
        *_dashboard_options(cluster),
        "--dashboard-agent-listen-port=0",
        "--include-log-monitor=false",  # it repeats logs to drivers, which ours do not need
        f"--temp-dir={cluster.temp_dir}",
        "--disable-usage-stats",
        "--no-monitor",  # one machine does not scale
    ]
    _run(command, settings, "ray-start.log", "Ray")


def _dashboard_options(cluster: LocalCluster) -> list[str]:
    if not cluster.dashboard_url:
        return ["--include-dashboard=false"]
    listening = [f"--dashboard-host={loopback.LOOPBACK}", f"--dashboard-port={_port(cluster.dashboard_url)}"]
    return ["--include-dashboard=true", *listening]


def _deploy(cluster: LocalCluster, settings: Settings) -> None:
    """Deploy in a separate process, so that this one never becomes part of the cluster."""
    command = [sys.executable, "-u", "-m", "controlplane.runtime.start_serve", cluster.ray_address]
    _run(command, settings, "serve-start.log", "the control plane")


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def _run(command: list[str], settings: Settings, log_name: str, what: str) -> None:
    """Run a step of the start. Errors: Unavailable with the end of the step's output."""
    log = settings.home / log_name
    with log.open("w") as out:
        try:
            result = subprocess.run(
                command,
                env=cluster_environment(settings),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=START_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as e:
            raise errors.Unavailable(f"{what} did not start within {e.timeout:.0f} s; see {log}") from e
    if result.returncode != 0:
        tail = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-15:]
        reason = tail[-1] if tail else f"the process ended with code {result.returncode}"
        raise errors.Unavailable("\n".join([f"{what} did not start: {reason}; see {log}", *tail]))


def _wait_ready(cluster: LocalCluster, settings: Settings) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _answers(cluster.url):
        if time.monotonic() > deadline:
            raise errors.Unavailable(
                f"{cluster.url} does not answer; see the logs in {settings.home} and {cluster.temp_dir}"
            )
        time.sleep(0.2)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
