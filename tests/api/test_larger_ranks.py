"""A LoRA adapter of a larger rank than the engines of its base take: new engines take over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from controlplane.controller import group_actions
from placement.types import Inventory
from testkit.api.installations import Installation, Start, wait_for
from testkit.in_memory import CPU


def groups(asked: Installation) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = asked.http.get("/deployments/base").json()["groups"]
    return found


@pytest.fixture
def narrow(start: Start, monkeypatch: pytest.MonkeyPatch) -> Installation:
    """Engines for ranks up to 16, and an adapter of rank 64."""
    monkeypatch.setattr(group_actions, "QUIET_S", 0.02)
    monkeypatch.setattr(group_actions, "LOOK_S", 0.01)
    served = start(max_lora_rank=64)
    served.up("v1")
    assert served.register("rank", "base")["phase"] == "Ready"
    return served


def test_a_larger_rank_gets_a_new_engine_while_the_old_one_answers(narrow: Installation) -> None:
    narrow.cluster.held.add("base@1")
    shown = narrow.post("/plan", {"model": "rank"}).json()
    reason = "replaces base, for LoRA adapters up to rank 64"
    assert (shown["running"], shown["waits"]) == (True, f"waits for a new engine that {reason}")
    accepted = narrow.post("/deploy_model", {"model": "rank"})
    assert [(g["name"], g["reason"]) for g in groups(narrow)] == [("base", ""), ("base@1", reason)]
    where = f"/operations/{accepted.json()['id']}"
    wait_for(lambda: "'rank' waits for base@1: " in str(narrow.http.get(where).json()["events"]))
    assert ("base", "rank") not in narrow.cluster.loads
    for model in ("base", "v1"):
        assert narrow.chat("hello", model).status_code == 200
    narrow.cluster.held.clear()
    assert narrow.end(accepted)["phase"] == "Deployed"
    wait_for(lambda: [g["name"] for g in groups(narrow)] == ["base@1"])
    for model in ("base", "v1", "rank"):
        assert narrow.chat("hello", model).status_code == 200
    plan = narrow.http.get("/deployments/base").json()["plan"]
    assert (plan["maxLoraRank"], plan["maxModelLen"]) == (64, 64)


def test_without_room_for_a_new_engine_following_the_advice_works(narrow: Installation) -> None:
    devices = narrow.cluster.devices
    narrow.cluster.devices = Inventory((replace(CPU, free_bytes=0),))
    before = narrow.records()
    for reply in (narrow.post("/deploy_model", {"model": "rank"}), narrow.post("/plan", {"model": "rank"})):
        assert (reply.status_code, reply.json()["error"]["code"]) == (422, "no_feasible_plan")
        message = reply.json()["error"]["message"]
        assert message.startswith("'rank' has rank 64, but the engines of 'base' take LoRA adapters up to")
        assert "; undeploy 'v1', 'base' and deploy them again" in message
    assert narrow.records() == before
    narrow.cluster.devices = devices
    for name in ("v1", "base"):
        assert narrow.end(narrow.http.delete(f"/deployments/{name}"))["phase"] == "Deleted"
    for name in ("base", "v1", "rank"):
        assert narrow.deploy(name)["phase"] == "Deployed"


def test_a_rank_that_was_asked_for_is_changed_by_the_command_that_is_named(narrow: Installation) -> None:
    for name in ("v1", "base"):
        assert narrow.end(narrow.http.delete(f"/deployments/{name}"))["phase"] == "Deleted"
    assert narrow.deploy("base", engine={"loraRank": 8})["phase"] == "Deployed"
    reply = narrow.post("/deploy_model", {"model": "rank"})
    assert reply.status_code == 400
    assert "run `ostinato tune base --lora-rank 64`" in reply.json()["error"]["message"]
    assert narrow.http.patch("/deployments/base", json={"engine": {"loraRank": 64}}).status_code == 200
    assert narrow.deploy("rank")["phase"] == "Deployed"
    wait_for(lambda: [g["name"] for g in groups(narrow)] == ["base@1"])


def test_a_new_engine_that_does_not_start_ends_the_deployment_of_the_adapter(narrow: Installation) -> None:
    narrow.cluster.broken.add("base")
    ended = narrow.deploy("rank")
    assert (ended["phase"], ended["error"]["error"]["code"]) == ("Failed", "adapter_mismatch")
    assert "run `ostinato tune base --lora-rank 64`" in ended["error"]["error"]["message"]
    assert narrow.chat("hello", "v1").status_code == 200
