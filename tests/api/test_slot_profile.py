"""Measuring N through the API, on an engine in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from controlplane import errors
from controlplane.client import variant_limit_profile
from controlplane.client.client import Client
from controlplane.client.variant_limit_profile import Burst
from profiler.variant_limit import SlotMeasurement
from testkit.api.installations import Installation, Start

pytestmark = pytest.mark.slow  # bursts of requests take their time

BURST = Burst(seconds=0.2, concurrency=3)


@pytest.fixture
def tiered(start: Start) -> Installation:
    made = start(max_variants=2)
    made.up("v1", "v2")
    return made


@pytest.fixture
def client(tiered: Installation) -> Iterator[Client]:
    with Client(tiered.url) as client:
        yield client


def limit_of(client: Client) -> int:
    (engine,) = client.deployment("base").residency or []
    return engine.limit


def test_each_sensible_number_is_measured_and_the_best_applied(client: Client) -> None:
    told: list[str] = []
    profile = variant_limit_profile.run(client, "base", BURST, None, told.append)
    assert [m.limit for m in profile.measurements] == [1, 2]
    assert all(m.tokens_per_s > 0 and m.requests > 0 and 0 < m.ttft_s < 60 for m in profile.measurements)
    assert client.deployment("base").maxActiveVariants == profile.chosen == limit_of(client)
    assert any("2 variants at once" in line for line in told)


def test_a_slot_profile_requests_all_variants_at_one_length(tiered: Installation, client: Client) -> None:
    variant_limit_profile.run(client, "base", BURST, None, lambda line: None)
    calls = tiered.cluster.scripted("base").calls
    assert {c["model"] for c in calls} == {"v1", "v2"}
    assert all(c["ignore_eos"] and c["max_tokens"] in (1, BURST.max_tokens) for c in calls)


def test_a_failure_gives_the_former_number_back(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.tune("base", 2)

    def measure(client: Client, variants: object, limit: int, burst: Burst) -> SlotMeasurement:
        raise errors.EngineFailed("it died")

    monkeypatch.setattr(variant_limit_profile, "measure", measure)
    with pytest.raises(errors.EngineFailed):
        variant_limit_profile.run(client, "base", BURST, None, lambda line: None)
    assert client.deployment("base").maxActiveVariants == 2 == limit_of(client)


def test_a_request_that_never_gets_a_token_counts_with_its_wait(
    tiered: Installation, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variant_limit_profile, "PROMPT", "!hang")
    found = variant_limit_profile.measure(client, ["v1"], 1, Burst(seconds=0.4, concurrency=1))
    assert (found.tokens_per_s, found.requests) == (0, 1)
    assert 0.3 < found.ttft_s < 60


def test_a_deployment_without_slots_cannot_be_profiled(tiered: Installation, client: Client) -> None:
    with pytest.raises(errors.InvalidRequest, match="its base, 'base'"):
        variant_limit_profile.run(client, "v1", BURST, None, lambda line: None)
    tiered.end(tiered.http.delete("/deployments/v2"))
    with pytest.raises(errors.InvalidRequest, match="at least two deployed variants, but 'base' has 1"):
        variant_limit_profile.run(client, "base", BURST, None, lambda line: None)
    with pytest.raises(errors.NotDeployed):
        variant_limit_profile.run(client, "nobody", BURST, None, lambda line: None)
