"""A store of the version before modules were moved into folders: it opens, and its deployments answer.

`old_store.json` is what that version wrote for two bases, one of two groups, and two variants, one of which
was undeployed; `FILES` stands for the folder of the models.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from controlplane.settings import Settings
from controlplane.state.base import Write
from controlplane.state.stores import open_store
from testkit.api.installations import Installation, Start, wait_for

WRITTEN = Path(__file__).with_name("old_store.json")


@pytest.fixture
def found(tmp_path: Path, files: Path, start: Start) -> Installation:
    entries = json.loads(WRITTEN.read_text().replace("FILES", str(files)))
    store = open_store(Settings(home=tmp_path / "home").resolved_store_url)
    store.commit([Write(entry["kind"], entry["key"], json.dumps(entry["value"]), 0) for entry in entries])
    store.close()
    return start()


def test_deployments_of_an_older_store_come_back(found: Installation) -> None:
    """No engine runs any more: each is launched again, without being asked for."""
    assert found.repository.read().undecodable == ()
    wait_for(lambda: all(found.chat("one two", name).status_code == 200 for name in ("base", "other", "v1")))
    wait_for(lambda: serving(found) == {"base": 1, "other": 2, "v1": 0})
    assert found.http.get("/deployments/other").json()["intent"] == "minLat"
    assert found.http.get("/models/base").json()["evaluations"] == []
    operations = found.http.get("/operations").json()["operations"]
    assert len(operations) == 9
    records = [*operations, *found.http.get("/models").json()["models"]]
    assert {each["tenant"] for each in records} == {""}, "they are the installation's"


def test_an_older_store_is_changed_like_a_new_one(found: Installation) -> None:
    assert found.deploy("v2", maxOutputLength=16)["phase"] == "Deployed"
    assert found.chat("one two", "v2").status_code == 200
    assert found.end(found.http.delete("/deployments/v1"))["phase"] == "Deleted"
    assert found.end(found.http.delete("/models/v1"))["phase"] == "Deleted"


def serving(found: Installation) -> dict[str, int]:
    """The number of serving groups of each deployment that is Deployed."""
    deployments = found.http.get("/deployments").json()["deployments"]
    return {
        each["model"]: sum(group["phase"] == "Serving" for group in each["groups"])
        for each in deployments
        if each["phase"] == "Deployed"
    }


def test_variants_of_an_older_store_count_as_given(found: Installation) -> None:
    """They have no compression, and are taken to be as accurate as ever."""
    models = found.repository.read().models
    assert all(versioned.record.delta is None for versioned in models.values())
    assert found.http.get("/models/v1").json()["compression"] is None
    planned = found.post("/plan", {"model": "v2", "intent": "accSLO", "SLOs": {"accuracy": 99}})
    assert planned.status_code == 200, planned.text
