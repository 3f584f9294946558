"""Processes killed or stopped under load: every request ends, service returns in time, nothing acknowledged
is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from controlplane.runtime import local
from testkit.cluster.clusters import GIVE_UP_S, Cluster, name, scrape, until
from testkit.cluster.killing import BASE, ENGINE_ERRORS, MODELS, answers, assert_kept, report, strike
from testkit.cluster.load import Load, is_broken_off

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


def test_a_killed_echo_engine_is_replaced(echo_cluster: Cluster) -> None:
    before = echo_cluster.records()
    with Load(echo_cluster.url, MODELS, 16) as load:
        times = strike(load, lambda: echo_cluster.replica(f"model-{BASE}", "Engine"))
    report("echo engine", load, times)
    assert set(load.errors()) <= ENGINE_ERRORS
    assert_kept(echo_cluster, before)


def test_a_killed_controller_is_replaced(echo_cluster: Cluster, adapters: dict[str, Path]) -> None:
    """Requests do not notice; what was acknowledged just before is carried out by the next controller."""
    before = echo_cluster.records()
    variant = {"model": "spare", "base": BASE, "adapter": str(adapters["spare"])}
    with Load(echo_cluster.url, MODELS, 16) as load:
        until(lambda: load.successes_since(0) >= 16, "answers before the kill")
        for method, path, body in (
            ("POST", "/register_model", variant),
            ("POST", "/deploy_model", {"model": "spare"}),
            ("DELETE", "/deployments/spare", None),
        ):
            victim = _controller(echo_cluster)
            operation = echo_cluster.submit(method, path, body)
            victim.kill()
            killed = time.monotonic()
            ended = echo_cluster.finish(operation)
            took_s = time.monotonic() - killed
            until(partial(_replaced, echo_cluster, victim.pid), "a new one")
            print(
                f"\ncontroller killed after '{method} {path}' was acknowledged: {ended['phase']} "
                f"{took_s:.1f} s later, a new controller runs after {time.monotonic() - killed:.1f} s"
            )
    print(f"{len(load.outcomes)} requests meanwhile, errors {dict(load.errors())}")
    assert not load.errors()
    echo_cluster.http.delete("/models/spare").raise_for_status()
    assert_kept(echo_cluster, before)


def test_a_controller_that_finds_no_state_stops_no_engine(echo_cluster: Cluster, tmp_path: Path) -> None:
    """Serve gives it the engines' installation. Nothing is acknowledged until the state is back."""
    before, engine = echo_cluster.records(), echo_cluster.replica(f"model-{BASE}", "Engine")
    with Load(echo_cluster.url, MODELS, 4) as load:
        for file in echo_cluster.home.glob("state.db*"):
            file.rename(tmp_path / file.name)
        (victim := _controller(echo_cluster)).kill()
        until(partial(_replaced, echo_cluster, victim.pid), "a new one")
        until(lambda: _leads(echo_cluster) == 0, "a controller that stands by")
        refused = echo_cluster.http.post("/register_model", json={"model": "new", "source": "nowhere"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert not [*echo_cluster.home.glob("state.db*")], "no other state is made"
        for file in tmp_path.iterdir():
            file.rename(echo_cluster.home / file.name)
        until(lambda: _leads(echo_cluster) == 1, "a controller that acts")
    assert not load.errors()
    assert echo_cluster.replica(f"model-{BASE}", "Engine").pid == engine.pid
    assert_kept(echo_cluster, before)


def _leads(cluster: Cluster) -> float:
    found = cluster.http.get("/metrics/targets").json()
    address = next(one["targets"][0] for one in found if one["labels"]["component"] == "controller")
    return scrape(address, "ostinato_controller_leads")


def _replaced(cluster: Cluster, pid: int) -> bool:
    return _controller(cluster).pid != pid


def _controller(cluster: Cluster) -> psutil.Process:
    return cluster.replica("ostinato", "Controller")


def test_a_killed_gateway_is_replaced(echo_cluster: Cluster) -> None:
    before = echo_cluster.records()
    with Load(echo_cluster.url, MODELS, 16) as load:
        times = strike(load, lambda: echo_cluster.replica("ostinato", "Gateway"))
    report("gateway", load, times)
    assert all(error == "503 unavailable" or is_broken_off(error) for error in load.errors())
    assert_kept(echo_cluster, before)


def test_requests_at_a_gateway_end_when_it_hangs(echo_cluster: Cluster) -> None:
    """It breaks no connection, and Serve takes much longer to notice."""
    before = echo_cluster.records()
    body = {"model": BASE, "prompt": "hello", "max_tokens": 2}
    engine, gateway = (
        echo_cluster.replica(*which) for which in ((f"model-{BASE}", "Engine"), ("ostinato", "Gateway"))
    )
    with ThreadPoolExecutor(1) as pool, stopped(engine):
        asked = pool.submit(echo_cluster.http.post, "/v1/completions", json=body, timeout=GIVE_UP_S)
        until(partial(_is_under_way, echo_cluster), "the gateway to have the request")
        with stopped(gateway):
            with suppress(httpx.RemoteProtocolError):  # which HAProxy leaves to clients to repeat
                reply = asked.result(GIVE_UP_S)
                assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")
            assert gateway.status() == psutil.STATUS_STOPPED
    until(partial(answers, echo_cluster, BASE), "an answer when both go on")
    assert_kept(echo_cluster, before)


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.resume()


def _is_under_way(cluster: Cluster) -> bool:
    found = cluster.http.get("/metrics/targets").json()
    (address,) = (a for one in found if one["labels"]["component"] == "gateway" for a in one["targets"])
    told = httpx.get(f"http://{address}/metrics", timeout=GIVE_UP_S, trust_env=False).text
    return f'ostinato_requests_in_flight{{model="{BASE}"}} 1.0' in told


def test_a_head_that_died_is_started_again(echo_cluster: Cluster) -> None:
    """Ray's control store takes the whole cluster with it; nothing of Ray's brings it back."""
    before, watching = echo_cluster.records(), echo_cluster.supervisor()
    assert watching is not None
    dying = _gcs(echo_cluster)
    dying.kill()
    killed = time.monotonic()
    until(lambda: _gcs(echo_cluster).pid != dying.pid, "a new control store")
    new_s = time.monotonic() - killed
    for model in MODELS:
        until(partial(answers, echo_cluster, model), f"{model} to answer")
    all_s = time.monotonic() - killed
    print(f"\nGCS killed: a new one {new_s:.1f} s later, all models answer {all_s:.1f} s later")
    assert_kept(echo_cluster, before)
    found = local.find(echo_cluster.settings)
    assert found is not None
    echo_cluster.local = found
    assert echo_cluster.supervisor() == watching
    assert "gcs_server ended" in (echo_cluster.home / "supervisor.log").read_text()


def _gcs(cluster: Cluster) -> psutil.Process:
    found = [process for process in cluster.processes() if name(process) == "gcs_server"]
    assert len(found) == 1, found
    return found[0]


def test_a_restarted_cluster_serves_its_deployments(echo_cluster: Cluster) -> None:
    before = echo_cluster.records()
    down_s, up_s = echo_cluster.down(), echo_cluster.up()
    started = time.monotonic()
    for model in MODELS:
        until(partial(answers, echo_cluster, model), f"{model} to answer")
    print(
        f"\nwhole cluster: down in {down_s:.1f} s, up in {up_s:.1f} s, "
        f"all models answer {time.monotonic() - started:.1f} s later"
    )
    assert_kept(echo_cluster, before)
