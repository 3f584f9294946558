"""Run inside a Ray cluster of nodes `one` and `two`: serves a group on both, kills its parts, says the rest.

`python group_driver.py RAY_ADDRESS MODEL_FOLDER` prints one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import httpx
import psutil
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from controlplane.runtime.engine_replica import ENGINE, engine_application
from controlplane.settings import Settings
from workers.messages import EngineConfig, RankConfig, WorkerReport

T = TypeVar("T")

APP = "model-base"
MIB = 2**20
PROMPT = "Once upon a time, in a village by the sea, there lived"
KV_TOKENS = 4096
BOUND_S = 700.0


def config_of(folder: str) -> EngineConfig:
    per_layer = KV_TOKENS * 2 * 3 * 64 * 4
    parts = ((1, "one"), (2, "two"))
    return EngineConfig(
        engine="vllm",
        name="base",
        model_path=folder,
        dtype="float32",
        tensor_parallel=1,
        ranks=tuple(RankConfig(n, 2048 * MIB, per_layer * n, 8 * MIB, node) for n, node in parts),
        max_model_len=256,
        max_num_seqs=4,
        max_variants=1,
        max_lora_rank=16,
        variant_host_bytes=64 * MIB,
        variant_kinds=("lora",),
    )


def ask(report: WorkerReport) -> list[list[int]]:
    """Tokens of the prompt, and of the greedy answer."""
    body = {"model": "base", "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(
        f"http://{report.address}/v1/completions",
        json={**body, "return_token_ids": True},
        headers={"ostinato-secret": report.secret},
        timeout=600,
        trust_env=False,
    )
    choice = reply.raise_for_status().json()["choices"][0]
    return [choice["prompt_token_ids"], choice["token_ids"]]


def until(check: Callable[[], T | None], what: str) -> T:
    deadline = time.monotonic() + BOUND_S
    while time.monotonic() < deadline:
        try:
            if found := check():
                return found
        except Exception as e:
            print(f"{what}: not yet ({type(e).__name__})", file=sys.stderr)
        time.sleep(0.5)
    raise TimeoutError(f"{what}: nothing within {BOUND_S:.0f} s")


def family(report: WorkerReport) -> dict[str, psutil.Process]:
    """The group's processes: each rank, and what it hangs by."""
    first, second = (psutil.Process(rank.pid) for rank in report.ranks)
    follower = second.parent()
    assert follower is not None
    return {
        "replica": psutil.Process(report.pid),
        "rank 0": first,
        "follower": follower,
        "rank 1": second,
    }


def replaced(handle: DeploymentHandle, old: WorkerReport) -> WorkerReport:
    """The report of the replica that takes the place of `old`, once it serves."""

    def look() -> WorkerReport | None:
        report: WorkerReport = handle.report.remote().result(timeout_s=10)
        return report if report.pid != old.pid and ask(report) else None

    return until(look, "another replica")


def strike(handle: DeploymentHandle, victim: str) -> tuple[dict[str, Any], WorkerReport]:
    """Kill -9 one of the group's processes. All must end, and a new group serve."""
    old = handle.report.remote().result()
    members = family(old)
    os.kill(members[victim].pid, signal.SIGKILL)
    began = time.monotonic()
    gone = psutil.wait_procs(members.values(), timeout=600)[0]
    gone_s = time.monotonic() - began
    new = replaced(handle, old)
    left = [name for name, process in members.items() if process not in gone]
    return {"left": left, "gone_s": gone_s, "serves_s": time.monotonic() - began, "answer": ask(new)}, new


def main() -> None:
    ray.init(address=sys.argv[1], log_to_driver=False)
    ids = {n["NodeName"]: n["NodeID"] for n in ray.nodes() if n["Alive"]}
    began = time.monotonic()
    serve.run(
        engine_application(config_of(sys.argv[2]), Settings(worker_host=ray.util.get_node_ip_address()), ids),
        name=APP,
        route_prefix=None,
    )
    handle = serve.get_deployment_handle(ENGINE, APP)
    report = handle.report.remote().result()
    facts: dict[str, Any] = {
        "up_s": time.monotonic() - began,
        "ranks": [(r.rank, r.node, r.layers) for r in report.ranks],
        "answer": ask(report),
    }
    facts["replica"], report = strike(handle, "replica")
    members = family(report)
    serve.delete(APP)
    alive = psutil.wait_procs(members.values(), timeout=600)[1]
    facts["left"] = [name for name, process in members.items() if process in alive]
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
