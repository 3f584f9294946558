"""An SLO that no plan meets, on a real cluster: the structured answer, and what may be relaxed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit.cluster.clusters import Cluster, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

NAME = "strict"
IMPOSSIBLE = {"model": NAME, "maxOutputLength": 32, "SLOs": {"tpot_ms": 1e-6, "accuracy": 90}}


@pytest.fixture(scope="module")
def strict(echo_cluster: Cluster, base_folder: Path) -> Iterator[Cluster]:
    echo_cluster.perform("POST", "/register_model", {"model": NAME, "source": str(base_folder)})
    yield echo_cluster
    echo_cluster.perform("DELETE", f"/models/{NAME}")


def ended(cluster: Cluster, body: dict[str, Any]) -> dict[str, Any]:
    operation = cluster.submit("POST", "/deploy_model", body)
    found: dict[str, Any] = until(
        lambda: (o := cluster.get(f"/operations/{operation}"))["done"] and o, operation
    )
    return found


def test_the_refusal_names_the_binding_limit_and_a_feasible_value(strict: Cluster) -> None:
    failed = ended(strict, IMPOSSIBLE)
    assert failed["phase"] == "Failed"
    error = failed["error"]["error"]
    assert error["code"] == "no_feasible_plan"
    assert error["details"]["binding"] == "SLOs.tpot_ms"
    (one,) = error["details"]["relaxations"]
    assert (one["constraint"], one["asked"]) == ("SLOs.tpot_ms", pytest.approx(1e-6))
    assert one["offered"] > one["asked"]
    shown = strict.http.post("/plan", json=IMPOSSIBLE)
    assert (shown.status_code, shown.json()["error"]["code"]) == (422, "no_feasible_plan")
    assert f"{NAME} " not in " ".join(strict.records()["deployments"])


def test_a_deployment_that_may_relax_limits_names_the_relaxed_limits(strict: Cluster) -> None:
    assert ended(strict, {**IMPOSSIBLE, "autoRelax": {"maxFactor": 2}})["phase"] == "Failed"
    found = ended(strict, {**IMPOSSIBLE, "autoRelax": {}})
    try:
        assert found["phase"] == "Deployed", found
        plan = strict.get(f"/deployments/{NAME}")["plan"]
        (one,) = plan["choice"]["relaxed"]
        assert one["constraint"] == "SLOs.tpot_ms"
        assert plan["estimatedTpotMs"] <= one["offered"]
        answer = strict.http.post(
            "/inference_model", json={"model": NAME, "inputText": "still here", "maxOutputLength": 8}
        )
        assert answer.json()["outputText"] == "still here"
    finally:
        strict.perform("DELETE", f"/deployments/{NAME}")


def test_two_ranks_of_one_host(strict: Cluster) -> None:
    """The requested split is launched: both ranks on the one CPU of the node."""
    asked = {"model": NAME, "maxOutputLength": 32, "layersPerStage": [1, 2]}
    assert ended(strict, asked)["phase"] == "Deployed"
    try:
        ranks = strict.get(f"/deployments/{NAME}")["plan"]["ranks"]
        assert [(r["device"], r["layers"]) for r in ranks] == [("cpu:0", [0, 1]), ("cpu:0", [1, 3])]
    finally:
        strict.perform("DELETE", f"/deployments/{NAME}")
