"""Processes killed under load: every request ends, service returns in time, nothing acknowledged is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
from clusters import Cluster, title, until
from load import CUT, HUNG, Load, error_code

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

BASE = "smol"
MODELS = (BASE, "forte", "smol:piano")
# Seconds within which new requests must succeed after a death.
ECHO_BOUND_S = 30.0
VLLM_BOUND_S = 180.0
CONTROLLER_BOUND_S = 30.0
GATEWAY_BOUND_S = 30.0
RESTART_BOUND_S = 90.0
ENGINE_ERRORS = {"502 engine_failed", "503 unavailable", "event engine_failed", "event unavailable"}


def _strike(load: Load, victim: Callable[[], psutil.Process], bound_s: float) -> tuple[float, float]:
    """Kill -9 the victim under load. Returns the seconds from then to the first new success, and to the
    last failure."""
    until(lambda: load.successes_since(0) >= 16, bound_s, "answers before the kill")
    dying = victim()
    dying.kill()
    killed = time.monotonic()
    dying.wait(10)

    def steady() -> bool:
        return load.successes_since(max(killed, load.last_failure())) >= 24

    until(lambda: victim().pid != dying.pid, bound_s, "a new process")
    until(steady, bound_s, "24 answers in a row")
    recovered = min(o.ended for o in load.outcomes if o.error is None and o.begun > killed)
    return recovered - killed, max(0.0, load.last_failure() - killed)


def _report(what: str, load: Load, times: tuple[float, float]) -> None:
    longest = max(o.ended - o.begun for o in load.outcomes)
    print(
        f"\n{what}: first new answer {times[0]:.1f} s, last failure {times[1]:.1f} s after kill -9; "
        f"{len(load.outcomes)} requests, errors {dict(load.errors())}, longest request {longest:.1f} s"
    )


def _assert_kept(cluster: Cluster, before: dict[str, set[str]]) -> None:
    def same() -> bool:
        after = cluster.records()
        assert after["models"] == before["models"]
        assert after["deployments"] == before["deployments"]
        assert after["operations"] >= before["operations"]
        return True

    until(same, 30, "the records from before")


def test_echo_engine_killed(echo_cluster: Cluster) -> None:
    before = echo_cluster.records()
    with Load(echo_cluster.url, MODELS, 16, ECHO_BOUND_S) as load:
        times = _strike(load, lambda: echo_cluster.replica(f"model-{BASE}", "Engine"), ECHO_BOUND_S)
    _report("echo engine", load, times)
    assert set(load.errors()) <= ENGINE_ERRORS
    assert max(times) < ECHO_BOUND_S
    _assert_kept(echo_cluster, before)


def test_controller_killed(echo_cluster: Cluster, adapters: dict[str, Path]) -> None:
    """Requests do not notice; what was acknowledged just before is carried out by the next controller."""
    before = echo_cluster.records()
    variant = {"model": "spare", "base": BASE, "adapter": str(adapters["spare"])}
    with Load(echo_cluster.url, MODELS, 16, ECHO_BOUND_S) as load:
        until(lambda: load.successes_since(0) >= 16, ECHO_BOUND_S, "answers before the kill")
        for method, path, body in (
            ("POST", "/register_model", variant),
            ("POST", "/deploy_model", {"model": "spare"}),
            ("DELETE", "/deployments/spare", None),
        ):
            victim = _controller(echo_cluster)
            operation = echo_cluster.submit(method, path, body)
            victim.kill()
            killed = time.monotonic()
            ended = echo_cluster.finish(operation, CONTROLLER_BOUND_S)
            took_s = time.monotonic() - killed
            until(
                lambda old=victim: _controller(echo_cluster).pid != old.pid, CONTROLLER_BOUND_S, "a new one"
            )
            print(
                f"\ncontroller killed after '{method} {path}' was acknowledged: {ended['phase']} "
                f"{took_s:.1f} s later, a new controller runs after {time.monotonic() - killed:.1f} s"
            )
    print(f"{len(load.outcomes)} requests meanwhile, errors {dict(load.errors())}")
    assert not load.errors()
    echo_cluster.http.delete("/models/spare").raise_for_status()
    _assert_kept(echo_cluster, before)


def _controller(cluster: Cluster) -> psutil.Process:
    return cluster.replica("ostinato", "Controller")


def test_gateway_killed(echo_cluster: Cluster) -> None:
    before = echo_cluster.records()
    with Load(echo_cluster.url, MODELS, 16, GATEWAY_BOUND_S) as load:
        times = _strike(load, lambda: echo_cluster.replica("ostinato", "Gateway"), GATEWAY_BOUND_S)
    _report("gateway", load, times)
    assert HUNG not in load.errors()
    assert CUT not in load.errors()
    assert max(times) < GATEWAY_BOUND_S
    _assert_kept(echo_cluster, before)


def test_the_whole_cluster_restarted(echo_cluster: Cluster) -> None:
    before = echo_cluster.records()
    down_s, up_s = echo_cluster.down(), echo_cluster.up()
    started = time.monotonic()
    for model in MODELS:
        until(lambda name=model: _answers(echo_cluster, name), RESTART_BOUND_S, f"{model} to answer")
    print(
        f"\nwhole cluster: down in {down_s:.1f} s, up in {up_s:.1f} s, "
        f"all models answer {time.monotonic() - started:.1f} s later"
    )
    _assert_kept(echo_cluster, before)


def _answers(cluster: Cluster, model: str) -> bool:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    return cluster.http.post("/v1/chat/completions", json=body).status_code == 200


def _engine_core(cluster: Cluster) -> psutil.Process:
    """The process the base's replica spawned.

    Its title cannot be relied on: setproctitle silently does nothing in a process that has changed the
    first variable of its environment, and which one is first is the machine's affair.
    """
    children = cluster.replica(f"model-{BASE}", "Engine").children()
    titles = {p: title(p) for p in children}
    cores = [p for p, name in titles.items() if name.startswith("VLLM::EngineCore") or "spawn_main" in name]
    assert len(cores) == 1, f"vLLM's engine core: {len(cores)} of {list(titles.values())}"
    return cores[0]


def test_vllm_engine_killed(cluster: Cluster) -> None:
    """The engine that takes its place also runs as many variants at once as was asked of the old one."""
    tuned = cluster.http.patch(f"/deployments/{BASE}", json={"maxActiveVariants": 2})
    assert tuned.status_code == 200, tuned.text
    before = cluster.records()
    children = cluster.replica(f"model-{BASE}", "Engine").children(recursive=True)
    with Load(cluster.url, MODELS, 8, VLLM_BOUND_S) as load:
        times = _strike(load, lambda: cluster.replica(f"model-{BASE}", "Engine"), VLLM_BOUND_S)
    _report("vLLM engine", load, times)
    assert set(load.errors()) <= ENGINE_ERRORS
    assert max(times) < VLLM_BOUND_S
    orphans = psutil.wait_procs(children, timeout=10)[1]
    assert not orphans, f"the dead engine's children live on: {[(p.pid, title(p)) for p in orphans]}"
    _assert_kept(cluster, before)
    (residency,) = cluster.get(f"/deployments/{BASE}")["residency"]
    assert (residency["slots"], residency["limit"]) == (4, 2)


def test_vllm_engine_core_killed_while_streaming(cluster: Cluster) -> None:
    # The test before may have left the engine in flux: one that starts has no engine core yet.
    until(lambda: all(_answers(cluster, m) for m in MODELS), VLLM_BOUND_S, "answers", every_s=0.5)
    old = until(lambda: _engine_core(cluster), VLLM_BOUND_S, "vLLM's engine core")
    before = cluster.records()
    body = {
        "model": "forte",
        "prompt": "Once upon a time",
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
    }
    events: list[str] = []
    killed = 0.0
    with httpx.stream(
        "POST", f"{cluster.url}/v1/completions", json=body, timeout=30, trust_env=False
    ) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
            if len(events) == 5 and not killed:
                old.kill()
                killed = time.monotonic()
    ended_s = time.monotonic() - killed
    failed = [event for event in events if error_code(event) is not None]
    print(f"\nengine core killed: the stream ended {ended_s:.2f} s later with {events[-2:]}")
    assert failed, "the stream ended as if it were whole"
    assert error_code(failed[0]) == "engine_failed"
    assert ended_s < 15
    until(lambda: all(_answers(cluster, m) for m in MODELS), VLLM_BOUND_S, "answers", every_s=0.5)
    print(f"all models answer {time.monotonic() - killed:.1f} s after the engine core's death")
    until(lambda: _engine_core(cluster).pid != old.pid, VLLM_BOUND_S, "a new engine core")
    _assert_kept(cluster, before)
