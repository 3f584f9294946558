"""An engine killed under load: every request ends, service returns in time, nothing acknowledged is lost."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import psutil
import pytest

from testkit.cluster.clusters import GIVE_UP_S, Cluster, title, until
from testkit.cluster.killing import BASE, ENGINE_ERRORS, MODELS, answers, assert_kept, report, strike
from testkit.cluster.load import Load, error_code

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


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


def test_a_killed_vllm_engine_is_replaced(cluster: Cluster) -> None:
    """The engine that takes its place also runs as many variants at once as was asked of the old one."""
    tuned = cluster.http.patch(f"/deployments/{BASE}", json={"maxActiveVariants": 2})
    assert tuned.status_code == 200, tuned.text
    before = cluster.records()
    children = cluster.replica(f"model-{BASE}", "Engine").children(recursive=True)
    with Load(cluster.url, MODELS, 8) as load:
        times = strike(load, lambda: cluster.replica(f"model-{BASE}", "Engine"))
    report("vLLM engine", load, times)
    assert set(load.errors()) <= ENGINE_ERRORS
    orphans = psutil.wait_procs(children, timeout=GIVE_UP_S)[1]
    assert not orphans, f"the dead engine's children live on: {[(p.pid, title(p)) for p in orphans]}"
    assert_kept(cluster, before)
    (residency,) = cluster.get(f"/deployments/{BASE}")["residency"]
    assert (residency["slots"], residency["limit"]) == (4, 2)


def test_vllm_engine_core_killed_while_streaming(cluster: Cluster, adapters: dict[str, Path]) -> None:
    """A variant that is deployed at that moment waits for the engine that takes its place."""
    # The test before may have left the engine in flux: one that starts has no engine core yet.
    until(lambda: all(answers(cluster, m) for m in MODELS), "answers", every_s=0.5)
    old = until(lambda: _engine_core(cluster), "vLLM's engine core")
    before = cluster.records()
    cluster.perform(
        "POST", "/register_model", {"model": "late", "base": BASE, "adapter": str(adapters["spare"])}
    )
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
        "POST", f"{cluster.url}/v1/completions", json=body, timeout=GIVE_UP_S, trust_env=False
    ) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
            if len(events) == 5 and not killed:
                old.kill()
                killed = time.monotonic()
                deploying = cluster.submit("POST", "/deploy_model", {"model": "late", "maxOutputLength": 16})
    ended_s = time.monotonic() - killed
    failed = [event for event in events if error_code(event) is not None]
    print(f"\nengine core killed: the stream ended {ended_s:.2f} s later with {events[-2:]}")
    assert failed, "the stream ended as if it were whole"
    assert error_code(failed[0]) == "engine_failed"
    until(lambda: all(answers(cluster, m) for m in MODELS), "answers", every_s=0.5)
    print(f"all models answer {time.monotonic() - killed:.1f} s after the engine core's death")
    until(lambda: _engine_core(cluster).pid != old.pid, "a new engine core")
    deployed = cluster.finish(deploying)
    print(f"deployed meanwhile: {[event['message'] for event in deployed['events']]}")
    assert answers(cluster, "late")
    for path in ("/deployments/late", "/models/late"):
        cluster.perform("DELETE", path)
    assert_kept(cluster, before)
