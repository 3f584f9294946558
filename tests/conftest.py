"""Shared fixtures: real servers, never stand-ins."""

from __future__ import annotations

import gc
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

from testkit.redis_server import RedisServer

# The time of an example depends on the machine's load. `make test` draws the same examples every time: a
# failure in CI fails here, with the change that caused it. HYPOTHESIS_PROFILE=explore looks for new ones.
BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", BUSY, max_examples=40, derandomize=True)
settings.register_profile("explore", BUSY, max_examples=1000)
settings.register_profile("quick", BUSY, max_examples=20)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "thorough"))

# Most of an engine's start on a CPU is Inductor compiling vLLM's code, which is not tested here.
# tests/workers/test_families.py compiles it once all the same.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

# Kernels run in Triton's interpreter where there is no GPU. Triton reads this when it is first imported,
# which a test of another folder may do.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Several engines and tests share the cores. A thread that waits by spinning takes them from those that work,
# and several threads for tensors as small as those here take half as much CPU again.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Ray runs its workers at a niceness of 15: next to a test that computes they get a thirtieth of its time.
# `ostinato up` starts Ray without; this is for tests that start Ray themselves.
os.environ.setdefault("RAY_worker_niceness", "0")

# Clusters of several tests share two cores. Each costs less while it waits without Ray's dashboard (a test of
# the dashboard asks for it), and with Serve's control loop three times a second instead of ten.
os.environ.setdefault("OSTINATO_DASHBOARD", "0")
os.environ.setdefault("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.3")


def pytest_configure(config: pytest.Config) -> None:
    """`make unit` is for quick answers, `make test` for many examples."""
    if "not slow" in config.option.markexpr and "HYPOTHESIS_PROFILE" not in os.environ:
        settings.load_profile("quick")


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The level is set even after an engine that this process started has raised the root logger's level."""
    caplog.set_level(logging.WARNING)
    return caplog


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The units that run side by side."""
    from tests.side_by_side import LongestFirst

    return LongestFirst(config, log)


def pytest_collection_finish() -> None:
    """Imported modules stay: searching all of them repeatedly takes a tenth of a run."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A failure shows its name at once, because a run takes many minutes. The rest follows at the end, as
    always."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid} failed ({report.when})", flush=True)


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
        server.kill()  # a client that has just begun to follow another does not end on request
