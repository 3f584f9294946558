"""Where variants are on a real engine, seen through API and metrics."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import httpx
import pytest

from testkit.cluster.clusters import GIVE_UP_S, Cluster, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

BASE = "smol"
VARIANTS = ("arithmetic", "kinship")
LONG = {"prompt": "One, two,", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


def residency(cluster: Cluster) -> dict[str, Any]:
    (engine,) = cluster.get(f"/deployments/{BASE}")["residency"]
    return dict(engine)


def tiers(cluster: Cluster) -> dict[str, str]:
    return {v["model"]: v["tier"] for v in residency(cluster)["variants"]}


def reason(cluster: Cluster, name: str) -> str:
    (engine,) = cluster.get(f"/deployments/{name}")["residency"]
    (variant,) = engine["variants"]
    return str(variant["reason"])


def ask(cluster: Cluster, model: str, max_tokens: int = 2) -> None:
    body = {"model": model, "prompt": "Hello", "max_tokens": max_tokens}
    reply = cluster.http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text


def _on_device(cluster: Cluster, model: str) -> bool:
    return tiers(cluster)[model] == "device"


def test_the_slot_goes_to_the_variant_that_is_asked(whole: Cluster) -> None:
    for name, other in (VARIANTS, VARIANTS[::-1], VARIANTS):
        ask(whole, name)
        until(partial(_on_device, whole, name), f"{name} on the device")
        assert tiers(whole)[other] in ("host", "disk")
        assert reason(whole, name) == ""
        assert "not in a slot" in reason(whole, other)
        (held,) = next(v for v in residency(whole)["variants"] if v["model"] == name)["ranks"]
        assert held["rank"] == 0
        assert held["deviceBytes"] > 1 << 20


def test_prefetching_brings_a_variant_from_disk_to_host_memory(whole: Cluster) -> None:
    first, second = VARIANTS
    ask(whole, second)  # reading it drove the other out of host memory
    until(lambda: tiers(whole) == {first: "disk", second: "device"}, "the first on disk only")
    for _ in range(2):
        reply = whole.http.post(f"/deployments/{first}/prefetch")
        assert reply.status_code == 200, reply.text
        assert reply.json()["residency"][0]["variants"][0]["tier"] == "host"
    assert tiers(whole) == {first: "host", second: "device"}, "its slot is left to the other"
    assert whole.http.post(f"/deployments/{BASE}/prefetch").status_code == 400


def test_a_request_that_waits_for_the_slot_is_counted_and_explained(whole: Cluster) -> None:
    first, second = VARIANTS
    ask(whole, second)
    with whole.http.stream(
        "POST", "/v1/completions", json={**LONG, "model": second, "stream": True}
    ) as reply:
        lines = reply.iter_lines()
        next(lines)
        waiting = threading.Thread(target=ask, args=(whole, first))
        waiting.start()
        until(lambda: residency(whole)["blockedRequests"] == 1, "a blocked request")
        assert "not in a slot" in reason(whole, first)
        assert whole.engine_metric("ostinato_variant_blocked_requests", BASE) == 1
    waiting.join(GIVE_UP_S)
    assert not waiting.is_alive()
    until(lambda: tiers(whole)[first] == "device" and not residency(whole)["blockedRequests"], "its turn")


def test_metrics_report_the_same_residency(whole: Cluster) -> None:
    assert whole.engine_metric("ostinato_variant_slots", BASE) == 1
    assert whole.engine_metric("ostinato_variants", BASE) == len(VARIANTS)
    assert whole.engine_metric("ostinato_variant_bytes", BASE) > 1 << 20
    assert whole.engine_metric("ostinato_variant_read_seconds_count", BASE) == len(VARIANTS)


def test_more_than_the_slots_is_refused(whole: Cluster) -> None:
    reply = whole.http.patch(f"/deployments/{BASE}", json={"maxActiveVariants": 2})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_request")
    assert "1 to 1" in reply.text


def test_unknown_deployments_are_refused(whole: Cluster) -> None:
    reply: httpx.Response = whole.http.patch("/deployments/nobody", json={"maxActiveVariants": 1})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_deployed")
