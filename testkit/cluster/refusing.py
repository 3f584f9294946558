"""Shared parts of tests of variants that engines refuse: requests to other variants meanwhile, and the
deployment's end."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from testkit.cluster.clusters import Cluster, until
from testkit.cluster.served import BASE, LORAS

PAUSE_S = (
    0.3  # pause between a model's requests: without it they take the cores of the engine that they wait for
)
MODELS = (BASE, *(lora.name for lora in LORAS))


@contextmanager
def asked_meanwhile(cluster: Cluster) -> Iterator[None]:
    """Send requests to the base and both LoRAs all the time; every request must get a text."""
    done = threading.Event()
    answers: list[tuple[str, int, str]] = []

    def ask(model: str) -> None:
        body = {"model": model, "prompt": "Once upon a time", "max_tokens": 2, "ignore_eos": True}
        with httpx.Client(base_url=cluster.url, timeout=300, trust_env=False) as http:
            while not done.is_set():
                reply = http.post("/v1/completions", json=body)
                answers.append((model, reply.status_code, reply.text))
                done.wait(PAUSE_S)

    threads = [threading.Thread(target=ask, args=(model,)) for model in MODELS]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert {model for model, *_ in answers} == set(MODELS)
    assert [answer for answer in answers if answer[1] != 200] == []


def register(cluster: Cluster, name: str, folder: Path) -> None:
    cluster.perform("POST", "/register_model", {"model": name, "base": BASE, "adapter": str(folder)})


def refused(cluster: Cluster, name: str) -> dict[str, Any]:
    """The error that deploying a variant ends with, after one attempt; nothing is left of the deployment."""
    return _refusal(cluster, name, _deployed(cluster, name))


def refused_when_read_again(cluster: Cluster, name: str) -> dict[str, Any]:
    """The same for a variant that was served until now.

    An engine forgets a variant when its last batch has ended: an earlier deployment finds it in memory.
    """

    def ended() -> dict[str, Any] | None:
        operation = _deployed(cluster, name)
        if operation["phase"] != "Deployed":
            return operation
        cluster.perform("DELETE", f"/deployments/{name}")
        return None

    return _refusal(cluster, name, until(ended, f"{name} to be read again"))


def _deployed(cluster: Cluster, name: str) -> dict[str, Any]:
    """Deploy a variant; returns the operation after its end."""
    operation = cluster.submit("POST", "/deploy_model", {"model": name, "maxOutputLength": 16})
    path = f"/operations/{operation}"
    until(lambda: cluster.get(path)["done"], f"the end of the deployment of {name}")
    ended: dict[str, Any] = cluster.get(path)
    return ended


def _refusal(cluster: Cluster, name: str, ended: dict[str, Any]) -> dict[str, Any]:
    assert ended["phase"] == "Failed", ended
    error: dict[str, Any] = ended["error"]["error"]
    assert ended["reason"] == error["message"]
    assert sum(event["message"].startswith("loading the variant") for event in ended["events"]) == 1, ended
    assert all(d["model"] != name for d in cluster.get("/deployments")["deployments"])
    print(f"\n{name}: Failed in {ended['updatedAt'] - ended['createdAt']:.1f} s: {ended['reason']}")
    return error


def ostinato(cluster: Cluster, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a separate process."""
    command = [sys.executable, "-c", "from controlplane.cli.main import main; main()", "--url", cluster.url]
    return subprocess.run([*command, *argv], check=False, capture_output=True, text=True, timeout=900)
