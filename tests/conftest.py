"""Shared fixtures: real servers, never stand-ins."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import redis
from filelock import FileLock
from hypothesis import HealthCheck, settings

# How long an example takes depends on the machine's load.
# `make test` draws the same examples every time: what fails in CI fails here, with the change that did it.
# HYPOTHESIS_PROFILE=explore looks for new ones.
BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", BUSY, max_examples=60, derandomize=True)
settings.register_profile("explore", BUSY, max_examples=1000)
settings.register_profile("quick", BUSY, max_examples=20)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "thorough"))

# Of an engine's start on a CPU most is Inductor compiling vLLM's code, which is not what is tested here.
# tests/workers/test_families.py compiles it once all the same.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

# Kernels run in Triton's interpreter where there is no GPU. Triton reads this when it is first imported,
# which a test of another folder may do.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Several engines and tests share the cores. A thread that waits by spinning takes them from those that work,
# and several threads for tensors as small as those here take half as much CPU again.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Ray runs its workers, which are our control plane and engines, at a niceness of 15: beside a test that
# computes they get a thirtieth of its time, and the clusters' tests take longest as it is.
os.environ.setdefault("RAY_worker_niceness", "0")


def pytest_configure(config: pytest.Config) -> None:
    """`make unit` is for quick answers, `make test` for many examples."""
    if "not slow" in config.option.markexpr and "HYPOTHESIS_PROFILE" not in os.environ:
        settings.load_profile("quick")


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Also after an engine that this process started has raised the root logger's level."""
    caplog.set_level(logging.WARNING)
    return caplog


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What runs side by side."""
    from side_by_side import FoldersAndFiles

    return FoldersAndFiles(config, log)


def pytest_collection_finish() -> None:
    """What was imported stays: to look through all of it again and again takes a tenth of a run."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A failure has its name at once: a run takes many minutes. The rest is told at the end, as always."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid} failed ({report.when})", flush=True)


def free_port() -> int:
    """One that the kernel gives nobody who did not ask for it by its number, and below those that Ray's
    workers and a node of Redis Cluster (+10000) take; so it stays free until whoever asked listens there."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


class RedisServer:
    """A redis-server of our own: its data in `folder`, each acknowledged write on disk."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.options = options
        for _ in range(3):
            self.port = free_port()
            if self._start():
                return
        self._fail()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start again, on the same port and data."""
        if not self._start():
            self._fail()

    def _fail(self) -> NoReturn:
        pytest.fail(
            f"redis-server did not start: exit {self.process.returncode}; see {self.folder}/redis.log"
        )

    def _start(self) -> bool:
        """Whether it came up; it does not when somebody took the port meanwhile."""
        self.process = subprocess.Popen(
            [
                redis_binary(),
                *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)),
                *("--appendonly", "yes", "--appendfsync", "always", "--save", ""),
                *("--logfile", str(self.folder / "redis.log"), *self.options),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + 60
        while not self._is_up():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                return False
            time.sleep(0.02)
        return True

    def _is_up(self) -> bool:
        """Whether the server that answers is this one, with its data loaded."""
        with contextlib.suppress(redis.RedisError), redis.Redis(port=self.port) as client:
            return bool(client.info("server")["process_id"] == self.process.pid and client.ping())
        return False

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """SIGKILL: what was not on disk or in the kernel is gone."""
        self.process.kill()
        self.process.wait(60)


def redis_binary() -> str:
    found = shutil.which("redis-server")
    if found is None:
        pytest.fail(
            "redis-server is missing, and the tests of the Redis state store need a real one; "
            "install it: apt-get install redis-server",
            pytrace=False,
        )
    return found


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One server for the whole session: give each test its own `?prefix=`."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def smollm2_conversion(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The bundled SmolLM2, converted once for all who only read it, and what was said meanwhile.

    Nothing else is in the folder above. Processes side by side share it.
    """
    from workers.bundled import smollm2

    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    messages = shared / "smollm2.json"
    with FileLock(shared / "smollm2.lock"):
        said: list[str] = []
        folder = smollm2.ensure(shared / "smollm2", said.append)
        if said:
            messages.write_text(json.dumps(said))
    return folder, json.loads(messages.read_text())


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_conversion: tuple[Path, list[str]]) -> Path:
    return smollm2_conversion[0]


@pytest.fixture
def start_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RedisServer]]:
    """Start servers that the test may kill and start again; all end with the test."""
    servers: list[RedisServer] = []

    def start(*options: str) -> RedisServer:
        servers.append(RedisServer(tmp_path_factory.mktemp("redis"), *options))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()  # one that has just begun to follow another does not end when it is asked to
