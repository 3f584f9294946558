"""A real local cluster for tests: started, driven over HTTP, inspected, and ended without leftovers."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from controlplane.runtime import local, pidfile
from controlplane.runtime.local import LocalCluster
from controlplane.settings import Settings
from profiler.compiled import DIRECTORY_VARIABLE
from testkit.redis_server import free_port

# For a process with another home: this machine's compiled code, which takes half a minute to compile.
COMPILED = {
    DIRECTORY_VARIABLE: os.environ.get(DIRECTORY_VARIABLE, str(Path.home() / ".cache/ostinato/compiled"))
}
GIVE_UP_S = 900.0  # no step takes this long even on a busy machine: the awaited event does not come


class Cluster:
    """One local cluster. Its home lies directly below /tmp: Ray's socket paths may not be long."""

    def __init__(self, engine: str, allowed_roots: str, **settings: Any) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="ost-", dir="/tmp"))
        self.settings = Settings(
            home=self.home,
            http_port=free_port(),
            engine=engine,
            allowed_roots=allowed_roots,
            **{"store_url": "", "gateway_replicas": 1, "api_key": "", **settings},
        )
        self.local: LocalCluster
        self._marked: set[psutil.Process] = set()

    # --- its life --------------------------------------------------------------------------------

    def up(self) -> float:
        """Start the cluster. Returns the seconds that it took."""
        started = time.monotonic()
        self.local = local.up(self.settings, lambda message: None)
        self.http = self.client(self.settings.api_key)
        return time.monotonic() - started

    def down(self) -> float:
        """End the cluster. Returns the seconds that it took; fails if one of its processes is left."""
        self.http.close()
        members, started = self.processes(), time.monotonic()
        assert members, "the cluster has no processes to end"
        local.down(self.settings, lambda message: None)
        took_s = time.monotonic() - started
        left = [p for p in {*members, *self.processes()} if _runs(p)]
        assert not left, f"local.down left {[(p.pid, title(p)) for p in left]}"
        assert self.supervisor() is None
        assert not Path(self.local.temp_dir).exists()
        return took_s

    def discard(self) -> None:
        """End the cluster if needed, and delete its home."""
        local.end_leftovers(self.settings, lambda message: None)
        shutil.rmtree(self.home, ignore_errors=True)

    @property
    def url(self) -> str:
        return self.local.url

    def client(self, key: str = "") -> httpx.Client:
        """A client with this API key."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120, trust_env=False)

    # --- its API ---------------------------------------------------------------------------------

    def get(self, path: str) -> Any:
        reply = self.http.get(path)
        assert reply.status_code == 200, f"GET {path}: {reply.status_code} {reply.text}"
        return reply.json()

    def submit(self, method: str, path: str, body: dict[str, Any] | None = None) -> str:
        """Begin an operation; returns its id."""
        reply = self.http.request(method, path, json=body)
        assert reply.status_code in (200, 202), f"{method} {path}: {reply.status_code} {reply.text}"
        return str(reply.json()["id"])

    def finish(self, operation_id: str) -> dict[str, Any]:
        """Wait for an operation, and return it. Fails if the operation failed."""

        def done() -> dict[str, Any] | None:
            operation: dict[str, Any] = self.get(f"/operations/{operation_id}")
            return operation if operation["done"] else None

        operation: dict[str, Any] = until(done, f"operation {operation_id}")
        assert operation["error"] is None, operation
        return operation

    def perform(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return self.finish(self.submit(method, path, body))

    def serve_base(self, name: str, source: str, max_output: int) -> None:
        self.perform("POST", "/register_model", {"model": name, "source": source})
        self.perform("POST", "/deploy_model", {"model": name, "maxOutputLength": max_output})

    def serve_variant(self, name: str, base: str, adapter: Path, max_output: int) -> None:
        self.perform("POST", "/register_model", {"model": name, "base": base, "adapter": str(adapter)})
        self.perform("POST", "/deploy_model", {"model": name, "maxOutputLength": max_output})

    def records(self) -> dict[str, set[str]]:
        """The acknowledged state: models and deployments with their phases, operations by id."""
        return {
            "models": {f"{m['model']} {m['phase']}" for m in self.get("/models")["models"]},
            "deployments": {f"{d['model']} {d['phase']}" for d in self.get("/deployments")["deployments"]},
            "operations": {o["id"] for o in self.get("/operations")["operations"]},
        }

    def engine_metric(self, name: str, base: str) -> float:
        """A metric of the engine of `base`, summed over its labels, from the engine's own process."""
        component = f"engine-{base}"
        address = next(
            t["targets"][0] for t in self.get("/metrics/targets") if t["labels"]["component"] == component
        )
        return scrape(address, name)

    # --- its processes ---------------------------------------------------------------------------

    def supervisor(self) -> psutil.Process | None:
        """The cluster's supervisor, which is not one of its processes."""
        return pidfile.living(self.home / "supervisor.json")

    def processes(self) -> set[psutil.Process]:
        """All processes with the cluster's mark in their environment or its temporary folder on their command
        line, and their descendants.

        Each process is inspected separately: a process that ends meanwhile removes no other from the result.
        """
        by_pid = {p.pid: p for p in psutil.process_iter()}
        parents = {pid: _parent(p) for pid, p in by_pid.items()}
        marked = {pid for pid, p in by_pid.items() if self._bears_mark(p)}
        return {
            p for pid, p in by_pid.items() if pid != os.getpid() and marked.intersection(_line(pid, parents))
        }

    def _bears_mark(self, process: psutil.Process) -> bool:
        """Environments take long to read, and tests look several times a second: one with the mark is read
        once."""
        if process in self._marked:
            return True
        try:
            bears = process.environ().get(local.MARK) == self.local.mark
        except psutil.Error:
            bears = False  # its command line may be readable still
        if bears or self.local.temp_dir in title(process):
            self._marked.add(process)
            return True
        return False

    def replica(self, application: str, deployment: str) -> psutil.Process:
        """The one process of a deployment's replica; Ray names them `ray::ServeReplica:APP:DEPLOYMENT`."""
        wanted = f"ray::ServeReplica:{application}:{deployment}"
        return self.process(lambda name: name.startswith(wanted), wanted)

    def process(self, matches: Callable[[str], bool], what: str) -> psutil.Process:
        titles = {p: title(p) for p in self.processes()}
        found = [p for p, its_title in titles.items() if matches(its_title)]
        everything = sorted(its_title[:60] for its_title in titles.values())
        assert len(found) == 1, f"{what}: {[(p.pid, titles[p]) for p in found]} of {everything}"
        return found[0]


def _parent(process: psutil.Process) -> int:
    try:
        return process.ppid()
    except psutil.Error:
        return 0


def _line(pid: int, parents: dict[int, int]) -> set[int]:
    """The process and its ancestors."""
    line: set[int] = set()
    while pid in parents and pid not in line:
        line.add(pid)
        pid = parents[pid]
    return line


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def name(process: psutil.Process) -> str:
    """The kernel's name for the process, at most 15 characters: it is set even where a title has no room."""
    try:
        return process.name()
    except psutil.Error:
        return ""


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(check: Callable[[], Any], what: str, every_s: float = 0.25) -> Any:
    """The first true result of `check`, which may also raise before that.

    A check may take several hundredths of a second of CPU, and waits for it. Late results are accepted: the
    time is printed here, and measured in benchmarks.
    """
    give_up_s, last = time.monotonic() + GIVE_UP_S, None
    while time.monotonic() < give_up_s:
        try:
            if last := check():
                return last
        except (AssertionError, StopIteration, httpx.HTTPError) as e:
            last = e
        time.sleep(every_s)
    raise AssertionError(f"{what}: nothing within {GIVE_UP_S:.0f} s, last: {last!r}")


def scrape(address: str, name: str) -> float:
    """The sum of a metric's samples in an exposition. Raises AssertionError when it has none."""
    text = httpx.get(f"http://{address}/metrics", timeout=120, trust_env=False).text
    values = [
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.split("{")[0].split(" ")[0] == name
    ]
    assert values, f"{address} serves no {name}"
    return sum(values)
