"""A local cluster keeps to itself: no port of it can be reached from elsewhere, no second one is started."""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from controlplane import errors
from controlplane.cli.failures import ExitCode
from controlplane.runtime import local
from controlplane.settings import Settings
from testkit.cluster.clusters import COMPILED, Cluster
from testkit.redis_server import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


def _listening(process: psutil.Process) -> set[str]:
    try:
        found = process.net_connections(kind="tcp")
    except psutil.NoSuchProcess:
        return set()
    return {c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN}


def _is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    mapped = getattr(ip, "ipv4_mapped", None)
    return (mapped or ip).is_loopback


def test_every_port_is_on_loopback(echo_cluster: Cluster) -> None:
    addresses = {a for p in echo_cluster.processes() for a in _listening(p)}
    assert addresses, "nothing listens: the test looks at the wrong processes"
    assert {a for a in addresses if not _is_loopback(a)} == set()


def test_up_again_finds_the_running_cluster(echo_cluster: Cluster) -> None:
    said: list[str] = []
    assert local.up(echo_cluster.settings, said.append) == echo_cluster.local
    assert said == [f"already running at {echo_cluster.url}"]


def test_a_port_in_use_is_refused_with_a_way_out(echo_cluster: Cluster, tmp_path: object) -> None:
    settings = Settings.model_validate({**echo_cluster.settings.model_dump(), "home": tmp_path})
    with pytest.raises(errors.Unavailable, match="--port"):
        local.up(settings, lambda message: None)


def test_the_starting_user_reads_in_one_line_why_a_step_failed(tmp_path: Path) -> None:
    step = [sys.executable, "-u", "-c", "print('much'); raise SystemExit('no room')"]
    with pytest.raises(errors.Unavailable) as told:
        local._run(step, Settings(home=tmp_path), "step.log", "Ray")
    assert told.value.message.splitlines()[0] == f"Ray did not start: no room; see {tmp_path}/step.log"


# --- without Ray's program ---------------------------------------------------------------------------

ROOT = Path(__file__).parents[3]
SYSTEM = "/usr/bin:/bin"


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment that can import all that this one can, and has none of its programs: as after
    `pip install --target`. Its home is short, as Ray's socket paths must be."""
    folder = tmp_path / "bare"
    venv.create(folder, with_pip=False)
    packages = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    paths = [path for path in sys.path if path.endswith("-packages")]
    (Path(packages) / "borrowed.pth").write_text("\n".join(paths))
    home = Path(f"/tmp/ost-bare-{os.getpid()}")
    yield {
        "PATH": f"{folder / 'bin'}:{SYSTEM}",
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "OSTINATO_HOME": str(home),
        "OSTINATO_HTTP_PORT": str(free_port()),
        "OSTINATO_ENGINE": "echo",
        "OSTINATO_DASHBOARD": "0",
        **COMPILED,
    }
    local.end_leftovers(Settings(home=home), lambda message: None)
    shutil.rmtree(home, ignore_errors=True)


def ostinato(environment: dict[str, str], command: str, expected: int = 0) -> str:
    """The command line's output. Fails unless the command ends as expected."""
    start = "from controlplane.cli.main import main; main()"
    python = shutil.which("python", path=environment["PATH"])
    done = subprocess.run(
        [str(python), "-c", start, *command.split()],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def mute_proxy() -> Iterator[str]:
    """A proxy that takes connections and answers nothing, as one that drops what is for loopback."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_cluster_starts_and_ends_without_the_ray_command_behind_a_proxy_on_ipv6(
    bare: dict[str, str], mute_proxy: str
) -> None:
    bare |= dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), mute_proxy)
    bare |= {"OSTINATO_HTTP_HOST": "::1"}
    assert shutil.which("ray", path=bare["PATH"]) is None
    assert "starts no dashboard" in ostinato(bare, "up --dashboard-port 8265", ExitCode.USAGE)
    assert "did you mean OSTINATO_HTTP_HOST" in ostinato(
        bare | {"OSTINATO_HTP_HOST": "::1"}, "up", ExitCode.FAILED
    )
    said = ostinato(bare, "up")
    assert "Ray dashboard none" in said
    assert "no_proxy=::1" in said
    assert "started without a dashboard" in ostinato(bare, "dashboard", ExitCode.FAILED)
    url = f"http://[::1]:{bare['OSTINATO_HTTP_PORT']}"
    assert httpx.get(f"{url}/readyz", timeout=600, trust_env=False).status_code == 200
    assert "no models" in ostinato(bare, f"--url {url} status").lower()
    other = ostinato(bare | {"OSTINATO_MAX_MODEL_LEN": "512"}, "up", ExitCode.FAILED)
    assert "OSTINATO_MAX_MODEL_LEN is '100000000' there, but '512' is set now" in other
    assert "already running" in ostinato(bare, "up")
    assert "ended" in ostinato(bare, "down")
