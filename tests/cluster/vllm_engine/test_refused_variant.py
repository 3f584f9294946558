"""A variant that the running engine of its base has no memory for."""

from __future__ import annotations

from pathlib import Path

import pytest
from clusters import Cluster, until
from random_variants import RandomDelta, write_delta

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BASE = "smol"


def test_its_deployment_ends_with_the_reason(
    cluster: Cluster, base_folder: Path, adapters: dict[str, Path]
) -> None:
    """The base was deployed before the delta was registered. Its embedding is larger than all LoRAs."""
    folder = write_delta(base_folder, adapters["spare"].parent / "large", RandomDelta("large", 4))
    body = {"model": "large", "base": BASE, "adapter": str(folder)}
    cluster.perform("POST", "/register_model", body)
    operation = cluster.submit("POST", "/deploy_model", {"model": "large", "maxOutputLength": 16})
    path = f"/operations/{operation}"
    until(lambda: cluster.get(path)["done"], 300, "the end of a deployment that is refused")
    error = cluster.get(path)["error"]["error"]
    assert error["code"] == "adapter_mismatch"
    assert "undeploy its base and deploy it again" in error["message"]
    assert all(d["model"] != "large" for d in cluster.get("/deployments")["deployments"])
    cluster.perform("DELETE", "/models/large")


def test_what_an_engine_logs_can_be_read_at_once(cluster: Cluster) -> None:
    log = cluster.http.get(f"/deployments/{BASE}/logs", params={"lines": 10_000}).text
    assert f"engine of {BASE} is ready" in log
