"""PATCH /deployments/{name} with placeAnew: engines with memory for what is registered now take over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from controlplane.controller import group_actions
from placement.types import Inventory
from testkit import random_variants
from testkit.api.installations import Installation, Start, wait_for
from testkit.in_memory import CPU


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, and a delta of it with an embedding that is larger than all LoRAs in slots."""
    root = tmp_path_factory.mktemp("delta-files")
    base = random_variants.write_tiny_base(root / "base", vocab_size=1 << 14)
    random_variants.write(base, root / "delta", random_variants.RandomDelta("delta", 1))
    return root


@pytest.fixture
def served(start: Start, monkeypatch: pytest.MonkeyPatch) -> Installation:
    """The base was deployed before the delta was registered."""
    monkeypatch.setattr(group_actions, "QUIET_S", 0.02)
    monkeypatch.setattr(group_actions, "LOOK_S", 0.01)
    served = start()
    served.up()
    assert served.register("delta", "base")["phase"] == "Ready"
    return served


def place_again(asked: Installation, name: str = "base", **body: Any) -> httpx.Response:
    return asked.http.patch(f"/deployments/{name}", json={"placeAnew": True, **body})


def groups(asked: Installation) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = asked.http.get("/deployments/base").json()["groups"]
    return found


def variant_memory(asked: Installation, group_id: str) -> int:
    return sum(rank.variant_memory_bytes for rank in asked.cluster.engines[group_id].config.ranks)


def at_once(asked: Installation) -> dict[str, Any]:
    found: dict[str, Any] = asked.http.get("/deployments/base").json()["variantsAtOnce"]
    (listed,) = (d for d in asked.http.get("/deployments").json()["deployments"] if d["model"] == "base")
    assert listed["variantsAtOnce"] == found
    return found


def test_a_new_engine_has_room_for_what_is_registered_now(served: Installation) -> None:
    before = variant_memory(served, "base")
    weight_bytes = served.http.get("/models/delta").json()["weightBytes"]
    served.cluster.held.add("base@1")
    assert at_once(served) == {"registered": 1, "atOnce": 0, "tooLarge": ["delta"]}
    reply = place_again(served)
    assert reply.status_code == 200, reply.text
    old, new = groups(served)
    assert (old["name"], old["phase"], new["name"]) == ("base", "Serving", "base@1")
    assert new["reason"].startswith("replaces base")
    wait_for(lambda: "base@1" in served.cluster.engines)
    assert variant_memory(served, "base@1") >= weight_bytes > before
    assert place_again(served).json()["error"]["code"] == "not_ready"  # one is under way
    assert served.chat("hello").status_code == 200
    served.cluster.held.clear()
    wait_for(lambda: [g["name"] for g in groups(served)] == ["base@1"])
    assert at_once(served) == {"registered": 1, "atOnce": 1, "tooLarge": []}
    assert set(served.cluster.engines) == {"base@1"}
    assert served.deploy("delta")["phase"] == "Deployed"
    assert served.chat("hello", "delta").status_code == 200


def test_the_old_engine_stays_without_room_for_both(served: Installation) -> None:
    served.cluster.devices = Inventory((replace(CPU, free_bytes=0),))
    before = served.records()
    reply = place_again(served)
    assert (reply.status_code, reply.json()["error"]["code"]) == (422, "no_feasible_plan")
    message = reply.json()["error"]["message"]
    assert message.startswith("there is no room for new engines of 'base' while the present engines serve (")
    assert "; undeploy 'base' and deploy it again" in message
    assert served.records() == before
    assert served.chat("hello").status_code == 200


def test_an_engine_that_does_not_start_leaves_the_old_one(served: Installation) -> None:
    served.cluster.broken.add("base")
    assert place_again(served).status_code == 200
    wait_for(lambda: [g["name"] for g in groups(served)] == ["base"])
    (old,) = groups(served)
    assert old["phase"] == "Serving"
    why = "base@1 could not replace it: the engine failed: RuntimeError: out of memory"
    assert old["reason"] == why
    assert served.chat("hello").status_code == 200
    served.cluster.broken.clear()
    served.cluster.held.add("base@1")
    assert place_again(served).status_code == 200
    assert [(g["name"], g["reason"] == why, g["replaces"]) for g in groups(served)] == [
        ("base", False, None),
        ("base@1", False, "base"),
    ]
    served.cluster.held.clear()
    wait_for(
        lambda: [(g["name"], g["reason"], g["replaces"]) for g in groups(served)] == [("base@1", "", None)]
    )


def test_each_of_several_engines_is_replaced(served: Installation) -> None:
    served.http.patch("/deployments/base", json={"replicas": {"min": 2, "max": 2}})
    wait_for(lambda: [g["phase"] for g in groups(served)] == ["Serving", "Serving"])
    assert place_again(served).status_code == 200
    wait_for(
        lambda: (
            [(g["name"], g["phase"]) for g in groups(served)]
            == [("base@2", "Serving"), ("base@3", "Serving")]
        )
    )


@pytest.mark.parametrize(
    ("name", "status", "code"),
    [("delta", 400, "invalid_request"), ("nobody", 404, "not_deployed")],
)
def test_a_model_that_cannot_be_placed_again_is_refused(
    served: Installation, name: str, status: int, code: str
) -> None:
    assert served.deploy("delta")["phase"] == "Deployed"
    reply = place_again(served, name)
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
