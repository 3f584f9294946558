"""The second bundled model on a real cluster: registered and measured, estimated, deployed and asked.

test_profiles.py does so with a small model of its family.
"""

from __future__ import annotations

import pytest

from testkit.cluster.clusters import GIVE_UP_S, Cluster

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3000)]

NAME = "gemma"


def test_gemma_is_registered_profiled_estimated_deployed_and_answers(cluster: Cluster) -> None:
    source = {"model": NAME, "source": "bundled://gemma-3-270m"}
    registered = cluster.finish(cluster.submit("POST", "/register_model", source))
    assert registered["phase"] == "Ready"
    profile = cluster.get(f"/models/{NAME}/profile")
    print(f"\n{profile['reason']}: {[(p['batch'], p['inputTokens'], p['tpotMs']) for p in profile['loads']]}")
    assert profile["phase"] == "Ready"
    assert len(profile["loads"]) == profile["plannedLoads"] == 4 + 8  # of itself, with variants
    load = {"batch": 1, "inputTokens": 16, "outputTokens": 16}
    estimate = cluster.http.post(f"/models/{NAME}/estimate", json=load).json()
    assert estimate["basis"] == "profile"
    assert 0 < estimate["tpotMs"]["low"] <= estimate["tpotMs"]["high"]
    request = {"model": NAME, "maxOutputLength": 32}
    cluster.finish(cluster.submit("POST", "/deploy_model", request))
    try:
        body = {"model": NAME, "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
        answer = cluster.http.post("/v1/completions", json=body, timeout=GIVE_UP_S).json()
        assert answer["usage"]["prompt_tokens"] == 6  # with the token that begins a text
        assert "France" in answer["choices"][0]["text"] or "city" in answer["choices"][0]["text"]
    finally:
        cluster.perform("DELETE", f"/deployments/{NAME}")
    cluster.perform("DELETE", f"/models/{NAME}")
