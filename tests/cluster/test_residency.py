"""Where variants are on a real engine, seen through API and metrics; and N changed while it runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from clusters import Cluster, until

from controlplane.client import variant_limit_profile
from controlplane.client.client import Client
from controlplane.client.variant_limit_profile import Burst

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BASE = "smol"
ADAPTERS = Path(__file__).parents[2] / "controlplane" / "demo" / "adapters"
VARIANTS = ("arithmetic", "kinship")
LONG = {"prompt": "One, two,", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def narrow(base_folder: Path) -> Iterator[Cluster]:
    """One slot, two variants, and host memory that holds one of them."""
    roots = f"{base_folder.parent}:{ADAPTERS}"
    made = Cluster("vllm", roots, max_variants=1, variant_host_bytes=1 << 20, profile=False)
    try:
        made.up()
        made.serve_base(BASE, str(base_folder), 512)
        for name in VARIANTS:
            made.serve_variant(name, BASE, ADAPTERS / name, 512)
        yield made
        made.down()
    finally:
        made.discard()


@pytest.fixture(scope="module")
def wide(cluster: Cluster) -> Iterator[Client]:
    """Four slots; the variants forte and piano."""
    with Client(cluster.url) as client:
        yield client


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


def test_the_slot_goes_to_the_variant_that_is_asked(narrow: Cluster) -> None:
    for name, other in (VARIANTS, VARIANTS[::-1], VARIANTS):
        ask(narrow, name)
        until(lambda name=name: tiers(narrow)[name] == "device", 20, f"{name} on the device")
        assert tiers(narrow)[other] in ("host", "disk")
        assert reason(narrow, name) == ""
        assert "not in a slot" in reason(narrow, other)
        (held,) = next(v for v in residency(narrow)["variants"] if v["model"] == name)["ranks"]
        assert held["rank"] == 0
        assert held["deviceBytes"] > 1 << 20


def test_prefetching_brings_a_variant_from_disk_to_host_memory(narrow: Cluster) -> None:
    first, second = VARIANTS
    ask(narrow, second)  # reading it drove the other out of host memory
    until(lambda: tiers(narrow) == {first: "disk", second: "device"}, 20, "the first on disk only")
    for _ in range(2):
        reply = narrow.http.post(f"/deployments/{first}/prefetch")
        assert reply.status_code == 200, reply.text
        assert reply.json()["residency"][0]["variants"][0]["tier"] == "host"
    assert tiers(narrow) == {first: "host", second: "device"}, "its slot is left to the other"
    assert narrow.http.post(f"/deployments/{BASE}/prefetch").status_code == 400


def test_a_request_that_waits_for_the_slot_is_counted_and_explained(narrow: Cluster) -> None:
    first, second = VARIANTS
    ask(narrow, second)
    with narrow.http.stream(
        "POST", "/v1/completions", json={**LONG, "model": second, "stream": True}
    ) as reply:
        lines = reply.iter_lines()
        next(lines)
        waiting = threading.Thread(target=ask, args=(narrow, first))
        waiting.start()
        until(lambda: residency(narrow)["blockedRequests"] == 1, 20, "a blocked request")
        assert "not in a slot" in reason(narrow, first)
        assert narrow.engine_metric("ostinato_variant_blocked_requests", BASE) == 1
    waiting.join(60)
    assert not waiting.is_alive()
    until(
        lambda: tiers(narrow)[first] == "device" and not residency(narrow)["blockedRequests"], 20, "its turn"
    )


def test_metrics_tell_the_same(narrow: Cluster) -> None:
    assert narrow.engine_metric("ostinato_variant_slots", BASE) == 1
    assert narrow.engine_metric("ostinato_variants", BASE) == len(VARIANTS)
    assert narrow.engine_metric("ostinato_variant_bytes", BASE) > 1 << 20
    assert narrow.engine_metric("ostinato_variant_read_seconds_count", BASE) == len(VARIANTS)


def test_more_than_the_slots_is_refused(narrow: Cluster) -> None:
    reply = narrow.http.patch(f"/deployments/{BASE}", json={"maxActiveVariants": 2})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_request")
    assert "1 to 1" in reply.text


def test_n_changes_while_requests_run(wide: Client, cluster: Cluster) -> None:
    wide.tune(BASE, 1)
    for name in ("forte", "piano"):
        ask(cluster, name)
    first_token = threading.Event()

    def second() -> None:
        with closing(wide.chunks("/v1/completions", {**LONG, "model": "piano", "max_tokens": 2})) as chunks:
            for _ in chunks:
                first_token.set()

    with closing(wide.chunks("/v1/completions", {**LONG, "model": "forte"})) as running:
        next(running)
        waiting = threading.Thread(target=second)
        waiting.start()
        until(lambda: residency(cluster)["blockedRequests"] == 1, 20, "a blocked request")
        assert not first_token.is_set()
        wide.tune(BASE, 2)
        assert first_token.wait(20), "with room for two the second runs beside the first"
        next(running)
    waiting.join(60)


def test_a_profile_measures_and_applies(wide: Client) -> None:
    burst = Burst(seconds=15, concurrency=4)  # on a busy machine a request takes seconds
    profile = variant_limit_profile.run(wide, BASE, burst, None, print)
    print([json.dumps(vars(m)) for m in profile.measurements])
    assert [m.limit for m in profile.measurements] == [1, 2]
    assert all(m.tokens_per_s > 0 and m.ttft_s > 0 for m in profile.measurements)
    view = wide.deployment(BASE)
    assert view.residency
    assert view.maxActiveVariants == profile.chosen == view.residency[0].limit


def test_unknown_deployments_are_refused(narrow: Cluster) -> None:
    reply: httpx.Response = narrow.http.patch("/deployments/nobody", json={"maxActiveVariants": 1})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_deployed")
