"""Where variants are, how many run at once, and reading one ahead: over HTTP, on engines in memory."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from testkit.api.installations import Installation, Start, wait_for
from testkit.api.tenants import code
from workers.engine import residency_cache as worker_residency


def with_three_variants(start: Start) -> Installation:
    """Two slots, three variants."""
    made = start(max_variants=2)
    made.up("v1", "v2")
    made.register("v3", "base", "v1")
    made.deploy("v3", maxOutputLength=32)
    return made


@pytest.fixture
def tiered(start: Start) -> Installation:
    return with_three_variants(start)


@pytest.fixture(scope="module")
def unchanged(start_shared: Start) -> Installation:
    """The same, for tests that change nothing."""
    return with_three_variants(start_shared)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_residency, "FRESH_S", 0.0)


def residency(installation: Installation, name: str) -> dict[str, Any]:
    """The only replica's."""
    (found,) = installation.http.get(f"/deployments/{name}").json()["residency"]
    return dict(found)


def tune(installation: Installation, name: str, limit: Any) -> httpx.Response:
    return installation.http.patch(f"/deployments/{name}", json={"maxActiveVariants": limit})


def test_a_base_reports_all_its_variants(unchanged: Installation) -> None:
    seen = residency(unchanged, "base")
    assert (seen["slots"], seen["limit"], seen["blockedRequests"]) == (2, 2, 0)
    assert [(v["model"], v["tier"], v["slot"]) for v in seen["variants"]] == [
        ("v1", "device", 0),
        ("v2", "device", 1),
        ("v3", "host", None),
    ]
    assert seen["variants"][0]["ranks"] == [{"rank": 0, "hostBytes": 1, "deviceBytes": 1}]
    assert [bool(v["reason"]) for v in seen["variants"]] == [False, False, True]


def test_a_variant_reports_its_own_residency(unchanged: Installation) -> None:
    (variant,) = residency(unchanged, "v3")["variants"]
    assert (variant["model"], variant["tier"]) == ("v3", "host")


def test_lists_do_not_ask_engines(unchanged: Installation) -> None:
    assert {d["residency"] for d in unchanged.http.get("/deployments").json()["deployments"]} == {None}


def test_a_variant_that_the_engine_does_not_know_is_on_disk(tiered: Installation) -> None:
    """The replica forgets, as after a restart."""
    tiered.cluster.scripted("base")._variants.clear()
    found = residency(tiered, "base")["variants"]
    assert {(v["tier"], v["reason"][:12]) for v in found} == {("disk", "not read yet")}


def test_the_reason_is_shown_while_the_engine_is_away(fresh: Installation) -> None:
    fresh.register("base")
    fresh.cluster.held.add("base")
    fresh.post("/deploy_model", {"model": "base"})
    wait_for(lambda: "base" in fresh.cluster.engines)
    fresh.cluster.engines.clear()
    fresh.cluster.held.add("base")
    view = fresh.http.get("/deployments/base").json()
    assert view["residency"] is None
    assert "base" in view["residencyReason"]


def test_a_new_variant_limit_reaches_the_engine_and_is_kept(tiered: Installation) -> None:
    reply = tune(tiered, "base", 1)
    assert reply.status_code == 200, reply.text
    assert (reply.json()["maxActiveVariants"], reply.json()["residency"][0]["limit"]) == (1, 1)
    assert tiered.repository.read().deployments["base"].record.max_active_variants == 1


def test_a_replica_that_forgot_the_limit_learns_it_with_the_next_request(tiered: Installation) -> None:
    tune(tiered, "base", 1)
    worker = tiered.cluster.engines["base"].worker
    worker._limit = None
    tiered.cluster.scripted("base")._limit = 2
    wait_for(lambda: tiered.services.routes.table.routes["v1"].variant_limit == 1)
    assert tiered.chat("x", "v1").status_code == 200
    assert residency(tiered, "base")["limit"] == 1


def test_a_relaunched_engine_starts_with_the_limit(tiered: Installation) -> None:
    tune(tiered, "base", 1)
    tiered.cluster.engines.clear()
    wait_for(lambda: "base" in tiered.cluster.engines)
    assert tiered.cluster.engines["base"].config.max_active_variants == 1


def test_limits_that_cannot_be(unchanged: Installation) -> None:
    assert code(tune(unchanged, "nobody", 1)) == (404, "not_deployed")
    for name, limit, what in [
        ("base", 3, "expected 1 to 2 variants at once"),
        ("base", 0, "maxActiveVariants"),
        ("base", None, "maxActiveVariants"),
        ("base", "many", "maxActiveVariants"),
        ("v1", 1, "its base, 'base'"),
    ]:
        reply = tune(unchanged, name, limit)
        assert code(reply) == (400, "invalid_request")
        assert what in reply.text
    assert code(unchanged.http.patch("/deployments/base", json={"slots": 1})) == (400, "invalid_request")
    assert unchanged.repository.read().deployments["base"].record.max_active_variants is None


def test_prefetching_is_harmless_to_repeat(tiered: Installation) -> None:
    engine = tiered.cluster.scripted("base")
    engine._variants.clear()
    for _ in range(2):
        reply = tiered.post("/deployments/v2/prefetch")
        assert reply.status_code == 200, reply.text
        (variant,) = reply.json()["residency"][0]["variants"]
        assert (variant["model"], variant["tier"]) == ("v2", "device")


def test_a_prefetch_of_a_base_or_an_undeployed_variant_is_refused(tiered: Installation) -> None:
    tiered.register("v4", "base", "v2")
    assert code(tiered.post("/deployments/base/prefetch")) == (400, "invalid_request")
    assert code(tiered.post("/deployments/v4/prefetch")) == (404, "not_deployed")
    assert code(tiered.post("/deployments/nobody/prefetch")) == (404, "model_not_found")
    tiered.cluster.refused.add("v1")
    assert code(tiered.post("/deployments/v1/prefetch")) == (422, "adapter_mismatch")
