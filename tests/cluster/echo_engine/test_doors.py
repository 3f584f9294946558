"""The hop from gateway to worker in a real cluster: closed to others, found again after changes."""

from __future__ import annotations

import time

import httpx
import psutil
import pytest

from testkit.cluster.clusters import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

BASE = "smol"
VARIANTS = ("forte", "piano")


def _ports(cluster: Cluster) -> list[int]:
    engine = cluster.replica(f"model-{BASE}", "Engine")
    found = engine.net_connections(kind="tcp")
    return [c.laddr.port for c in found if c.status == psutil.CONN_LISTEN]


def test_workers_answer_only_their_gateways(echo_cluster: Cluster) -> None:
    body = {"model": BASE, "prompt": "let me in"}
    answers = []
    for port in _ports(echo_cluster):
        try:
            url = f"http://127.0.0.1:{port}/v1/completions"
            answers.append(httpx.post(url, json=body, timeout=5, trust_env=False))
        except httpx.HTTPError:
            continue  # gRPC, or Ray's own
    assert [r.status_code for r in answers if "let me in" in r.text] == []
    assert 401 in {r.status_code for r in answers}, "the worker's port was not among those tried"


def test_no_answer_of_the_api_holds_a_secret(echo_cluster: Cluster) -> None:
    for path in ("/models", "/deployments", f"/deployments/{BASE}", "/operations", "/metrics/targets"):
        assert "secret" not in echo_cluster.http.get(path).text


def test_a_base_undeployed_and_deployed_again_answers(echo_cluster: Cluster) -> None:
    """Its new worker has another port and another secret, and is found under the name of the old one."""
    body = {"model": BASE, "prompt": "a b", "max_tokens": 2}
    assert echo_cluster.http.post("/v1/completions", json=body).status_code == 200
    for name in (*VARIANTS, BASE):
        echo_cluster.perform("DELETE", f"/deployments/{name}")
    assert echo_cluster.http.post("/v1/completions", json=body).status_code == 404
    for name in (BASE, *VARIANTS):
        echo_cluster.perform("POST", "/deploy_model", {"model": name, "maxOutputLength": 512})
    started = time.monotonic()
    for name in (BASE, *VARIANTS):
        reply = echo_cluster.http.post("/v1/completions", json={**body, "model": name})
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["text"] == "a b"
    print(f"\nanswers of all {time.monotonic() - started:.2f} s after the deployment")
