"""Plans of several ranks through `deploy_model`: launched as asked, answering like one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from testkit.cluster.clusters import Cluster, name, title, until
from testkit.cluster.served import BASE, LAYERS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

PROMPT = "Once upon a time, in a village by the sea, there lived"
TOKENS = 16
SPLIT = "split"


def greedy(cluster: Cluster, model: str) -> list[int]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    reply = cluster.http.post("/v1/completions", json={**body, "return_token_ids": True})
    assert reply.status_code == 200, reply.text
    return list(reply.json()["choices"][0]["token_ids"])


@pytest.mark.parametrize(
    ("asked", "layers", "tensor_parallel"),
    [
        # Stages are put on two nodes by tests/cluster/own_nodes/test_group_nodes.py.
        pytest.param({"layersPerStage": [1, 2]}, [1, 2], 1, id="two stages", marks=pytest.mark.long),
        pytest.param({"tensorParallel": [3], "pipelineParallel": [1]}, [LAYERS], 3, id="three-way tensors"),
    ],
)
def test_a_split_model_answers_like_the_whole(
    cluster: Cluster, base_folder: Path, asked: dict[str, Any], layers: list[int], tensor_parallel: int
) -> None:
    before = cluster.processes()
    cluster.perform("POST", "/register_model", {"model": SPLIT, "source": str(base_folder)})
    try:
        cluster.perform("POST", "/deploy_model", {"model": SPLIT, "maxOutputLength": 64, **asked})
        plan = cluster.get(f"/deployments/{SPLIT}")["plan"]
        assert (plan["layersPerStage"], plan["tensorParallel"]) == (layers, tensor_parallel)
        assert len(plan["ranks"]) == len(layers) * tensor_parallel
        assert greedy(cluster, SPLIT) == greedy(cluster, BASE)
        ranks = until(lambda: ranks_among(cluster.processes() - before, len(plan["ranks"])), "the ranks")
    finally:
        cluster.perform("DELETE", f"/deployments/{SPLIT}")
        cluster.http.delete(f"/models/{SPLIT}").raise_for_status()
    until(lambda: not any(p.is_running() for p in ranks), "the ranks to be gone")


def ranks_among(processes: set[psutil.Process], expected: int) -> list[psutil.Process]:
    """The processes that an engine's core spawned. A group that restarted on a crowded machine has them again
    after a while. The names that vLLM gives them are not always set (test_engine_killed.py)."""
    titles = {p: f"{name(p)} {title(p)}" for p in processes}
    spawned = {
        p.pid: p
        for p, called in titles.items()
        if ("VLLM::" in called and "VLLM::grammars" not in called) or "spawn_main" in called
    }
    found = [p for p in spawned.values() if p.is_running() and p.ppid() in spawned]
    assert len(found) == expected, sorted(called[-80:] for called in titles.values())
    return found
